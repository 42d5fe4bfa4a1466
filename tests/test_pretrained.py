"""Published checkpoints in and out: the reference's numbers, or a refusal."""

import json
import shutil
import subprocess
import sys

import keras
import numpy as np
import pretrained_cases as cases
import pytest
from keras import ops

import keras_tx as tx
from keras_tx.pretrained import FAMILIES, checkpoint, deferred, table
from keras_tx.pretrained.config import Config

safetensors_numpy = pytest.importorskip("safetensors.numpy")

# The fields of published configs as they are, but for the number of layers.
PUBLISHED = json.loads(
    (cases.FILES.parent / "published_configs.json").read_text(encoding="utf-8")
)

# Largest difference, relative to the largest logit where that exceeds 1.
TOLERANCE = 1e-5


def to_numpy(outputs):
    if isinstance(outputs, dict):
        return {name: ops.convert_to_numpy(x) for name, x in outputs.items()}
    return ops.convert_to_numpy(outputs)


def run(model, inputs):
    single = len(inputs) == 1
    return to_numpy(model(inputs["tokens"] if single else inputs))


def difference(name, model):
    """Returns the difference from a committed reference, relative as above."""
    inputs, expected = cases.load_expected(name)
    outputs = run(model, inputs)
    worst, scale = cases.largest_difference(
        cases.CASES[name], inputs, outputs, expected
    )
    return worst / max(scale, 1.0)


def variant(folder, name, *, config=None, tensors=None, without=()):
    """Copies a reference with other fields in its config, or other tensors.

    Args:
        folder: Where to.
        name: Name of the case.
        config: Fields to set.
        tensors: Function from the dict of tensors to another.
        without: Fields to remove.
    """
    fields = json.loads((cases.FILES / name / "config.json").read_text())
    fields.update(config or {})
    for field in without:
        fields.pop(field)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    weights = folder / "model.safetensors"
    if tensors is None:
        shutil.copy(cases.FILES / name / "model.safetensors", weights)
    else:
        found = safetensors_numpy.load_file(cases.FILES / name / "model.safetensors")
        safetensors_numpy.save_file(
            {k: np.ascontiguousarray(v) for k, v in tensors(found).items()}, weights
        )
    return folder


def old_spelling(parameters):
    """Returns `rope_parameters` as `rope_theta` and `rope_scaling`."""
    rules = dict(parameters)
    theta = rules.pop("rope_theta")
    return {
        "rope_theta": theta,
        "rope_scaling": {"type": rules.pop("rope_type"), **rules},
        "rope_parameters": None,
    }


@pytest.fixture(scope="module")
def loaded():
    """Returns a function that loads a reference, each once."""
    found = {}

    def load(name):
        if name not in found:
            found[name] = tx.load_pretrained(
                cases.FILES / name, **cases.CASES[name].options
            )
        return found[name]

    return load


# ----------------------------------------------------------------------------
# In: the numbers of the reference
# ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", cases.CASES)
def test_a_checkpoint_gives_the_numbers_of_the_reference(name, loaded):
    assert difference(name, loaded(name)) <= TOLERANCE


def test_every_family_has_a_reference():
    seen = {
        json.loads((cases.FILES / name / "config.json").read_text())["model_type"]
        for name in cases.CASES
    }
    assert seen == set(FAMILIES) == set(cases.FAMILIES)


def test_dropping_a_head_leaves_the_features(loaded):
    inputs, _ = cases.load_expected("bert_tokens")
    tokens = inputs["tokens"]
    features = tx.load_pretrained(cases.FILES / "bert_tokens", output="features")
    assert features(tokens).shape == (3, 9, 18)
    weights = {w.path for w in features.weights}
    assert weights < {w.path for w in loaded("bert_tokens").weights}


def test_a_model_without_its_optional_inputs_takes_one(loaded):
    inputs, _ = cases.load_expected("bert")
    plain = tx.load_pretrained(cases.FILES / "bert")
    (tokens,) = plain.inputs
    assert tokens.name == "tokens"
    zeros = np.zeros_like(inputs["tokens"])
    with_types = run(loaded("bert"), {**inputs, "token_types": zeros})
    np.testing.assert_array_equal(
        to_numpy(plain(inputs["tokens"])), with_types["features"]
    )


def test_right_padding_changes_nothing_before_it(loaded):
    model = loaded("roberta_tokens")
    inputs, _ = cases.load_expected("roberta_tokens")
    row = inputs["tokens"][1:2]
    np.testing.assert_allclose(
        to_numpy(model(row))[:, :5], to_numpy(model(row[:, :5])), atol=2e-6
    )


@pytest.mark.parametrize(
    ("asked", "expected"), [("auto", None), (None, None), (7, 7)], ids=str
)
def test_decoders_mask_padding_on_request_only(asked, expected):
    model = tx.load_pretrained(cases.FILES / "gemma2", pad_id=asked)
    assert model.get_layer("embedding").pad_id == expected


def test_packed_texts_do_not_see_each_other():
    model = tx.load_pretrained(cases.FILES / "gpt2", packed=True)
    inputs, expected = cases.load_expected("gpt2")
    tokens = inputs["tokens"][:2].reshape(1, -1)
    positions = np.tile(np.arange(9, dtype="int32"), 2)[None]
    segments = np.repeat(np.arange(2, dtype="int32"), 9)[None]
    logits = to_numpy(
        model({"tokens": tokens, "positions": positions, "segment_ids": segments})
    )
    np.testing.assert_allclose(
        logits.reshape(2, 9, -1), expected["logits"][:2], atol=2e-5
    )


# ----------------------------------------------------------------------------
# In: other spellings of the same
# ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama_tied", "llama3", "llama_yarn"])
def test_both_spellings_of_rope_settings_are_read(name, tmp_path):
    rules = json.loads((cases.FILES / name / "config.json").read_text())
    folder = variant(tmp_path, name, config=old_spelling(rules["rope_parameters"]))
    assert difference(name, tx.load_pretrained(folder)) <= TOLERANCE


def test_names_of_old_files_are_read(tmp_path):
    """No prefix, `gamma` and `beta`, buffers, and tied tensors written twice."""

    def old_bert(tensors):
        plain = {
            k.removeprefix("bert.")
            .replace("LayerNorm.weight", "LayerNorm.gamma")
            .replace("LayerNorm.bias", "LayerNorm.beta"): v
            for k, v in tensors.items()
        }
        plain["embeddings.position_ids"] = np.arange(24)[None]
        plain["cls.predictions.decoder.weight"] = plain[
            "embeddings.word_embeddings.weight"
        ]
        plain["cls.predictions.decoder.bias"] = plain["cls.predictions.bias"]
        plain["cls.seq_relationship.weight"] = np.zeros((2, 18), "float32")
        plain["pooler.dense.weight"] = np.zeros((18, 18), "float32")
        return plain

    def old_gpt2(tensors):
        plain = {k.removeprefix("transformer."): v for k, v in tensors.items()}
        plain["h.0.attn.bias"] = np.tril(np.ones((1, 1, 20, 20), "uint8"))
        plain["h.1.attn.masked_bias"] = np.array(-1e4, "float32")
        return plain

    folder = variant(tmp_path / "bert", "bert_tokens", tensors=old_bert)
    model = tx.load_pretrained(folder, token_types=True)
    assert difference("bert_tokens", model) <= TOLERANCE
    folder = variant(tmp_path / "gpt2", "gpt2", tensors=old_gpt2)
    assert difference("gpt2", tx.load_pretrained(folder)) <= TOLERANCE


def test_shards_are_read_as_one(tmp_path):
    folder = variant(tmp_path, "llama")
    tensors = safetensors_numpy.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, group in files.items():
        safetensors_numpy.save_file({n: tensors[n] for n in group}, folder / file)
    index = {n: file for file, group in files.items() for n in group}
    (folder / checkpoint.INDEX).write_text(json.dumps({"weight_map": index}))
    assert difference("llama", tx.load_pretrained(folder)) <= TOLERANCE


def test_an_untied_head_is_read_where_the_config_says_so(tmp_path):
    def untie(tensors):
        return {**tensors, "lm_head.weight": tensors["transformer.wte.weight"][::-1]}

    folder = variant(
        tmp_path, "gpt2", config={"tie_word_embeddings": False}, tensors=untie
    )
    model = tx.load_pretrained(folder)
    inputs, expected = cases.load_expected("gpt2")
    np.testing.assert_allclose(
        run(model, inputs), expected["logits"][..., ::-1], atol=5e-5
    )


def test_t5_is_tied_by_its_tensors_and_scaled_by_its_field(tmp_path):
    def untie(tensors):
        return {**tensors, "lm_head.weight": tensors["shared.weight"][::-1]}

    inputs, expected = cases.load_expected("t5")
    stated = {"tie_word_embeddings": False, "scale_decoder_outputs": None}
    for fields, factor in (
        ({"tie_word_embeddings": True}, 1.0),  # and a head that differs
        (stated, 4.0),  # 1.1 as it was published: no scaling by 16 ** -0.5
        ({**stated, "scale_decoder_outputs": True}, 1.0),
    ):
        folder = variant(tmp_path, "t5", config=fields, tensors=untie)
        logits = run(tx.load_pretrained(folder), inputs)
        np.testing.assert_allclose(
            logits, factor * expected["logits"][..., ::-1], atol=5e-5
        )


def test_windows_follow_from_either_setting(tmp_path, loaded):
    """`layer_types` overrules what `max_window_layers` implies."""
    folder = variant(
        tmp_path, "qwen2", config={"max_window_layers": 0, "layer_types": None}
    )
    everywhere = tx.load_pretrained(folder)
    windows = [
        model.get_layer(f"block_{i}").attention.attention.window
        for model in (everywhere, loaded("qwen2"))
        for i in range(2)
    ]
    assert windows == [3, 3, None, 3]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_files_are_read_exactly(dtype, tmp_path):
    import ml_dtypes

    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    folder = variant(
        tmp_path,
        "qwen3",
        tensors=lambda found: {k: v.astype(kind) for k, v in found.items()},
    )
    tensors = safetensors_numpy.load_file(cases.FILES / "qwen3" / "model.safetensors")
    expected = tensors["model.embed_tokens.weight"].astype(kind).astype("float32")
    table = tx.load_pretrained(folder).get_layer("embedding").embeddings
    assert keras.backend.standardize_dtype(table.dtype) == "float32"
    np.testing.assert_array_equal(ops.convert_to_numpy(table), expected)


@pytest.mark.parametrize("policy", ["bfloat16", "mixed_bfloat16"])
def test_the_dtype_is_chosen_at_load(policy):
    inputs, expected = cases.load_expected("llama")
    model = tx.load_pretrained(cases.FILES / "llama", dtype=policy)
    kinds = {keras.backend.standardize_dtype(w.dtype) for w in model.weights}
    assert kinds == {"bfloat16" if policy == "bfloat16" else "float32"}
    logits = run(model, inputs)
    assert logits.dtype == "float32"
    error = np.abs(logits - expected["logits"]).max()
    assert 1e-3 < error < 0.05 * np.abs(expected["logits"]).max()


# ----------------------------------------------------------------------------
# In: refusals
# ----------------------------------------------------------------------------


def test_a_missing_a_surplus_and_a_misshapen_tensor_are_all_listed(tmp_path):
    def spoil(tensors):
        tensors["model.layers.0.self_attn.extra.weight"] = np.ones(3, "float32")
        tensors["model.norm.weight"] = np.ones(17, "float32")
        del tensors["model.layers.1.mlp.up_proj.weight"]
        return tensors

    folder = variant(tmp_path, "llama", tensors=spoil)
    with pytest.raises(ValueError) as error:
        tx.load_pretrained(folder)
    text = str(error.value)
    assert "'layers.1.mlp.up_proj.weight' is missing" in text
    assert "block_1/feed_forward/widen/kernel" in text
    assert "'norm.weight' has the shape (17,)" in text and "(16,)" in text
    assert "'layers.0.self_attn.extra.weight' has no place" in text


def test_biases_that_the_config_denies_are_not_dropped(tmp_path):
    folder = variant(tmp_path, "llama_tied", config={"attention_bias": False})
    with pytest.raises(ValueError, match=r"q_proj.bias' has no place"):
        tx.load_pretrained(folder)


def test_a_tied_duplicate_must_equal_its_original(tmp_path):
    def differ(tensors):
        head = tensors["model.embed_tokens.weight"].copy()
        head[3, 2] += 1e-6
        return {**tensors, "lm_head.weight": head}

    folder = variant(tmp_path, "qwen2", tensors=differ)
    with pytest.raises(ValueError, match=r"lm_head.weight' is tied to .* and differs"):
        tx.load_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "fields", "named"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "relative_key"),
        ("bert", {"hidden_act": "quick_gelu"}, "quick_gelu"),
        ("bert_tokens", {"is_decoder": True}, "is_decoder"),
        ("bert", {"chunked_attention": 4}, "chunked_attention"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("llama", {"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ("llama", {"rope_scaling": {"rope_type": "new", "factor": 2.0}}, "new"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "factor"),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "factor": 2.0, "twist": 3}},
            "twist",
        ),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"residual_multiplier": 0.2}, "residual_multiplier"),
        ("llama", {"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        ("mistral", {"layer_types": ["full_attention"] * 2}, "layer_types"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 2}, "layer_types"),
        ("gemma2", {"use_bidirectional_attention": True}, "bidirectional"),
        ("t5", {"feed_forward_proj": "gated-quick_gelu"}, "quick_gelu"),
        ("llama", {"model_type": "mamba"}, "mamba"),
        ("llama", {"architectures": ["LlamaForTokenClassification"]}, "LlamaForToken"),
        ("llama", {"rms_norm_eps": "small"}, "rms_norm_eps"),
        ("llama", {"hidden_size": None}, "hidden_size"),
        ("bert", {"hidden_dropout_prob": 1.5}, "hidden_dropout_prob"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)
def test_settings_that_change_the_arithmetic_are_refused(name, fields, named, tmp_path):
    folder = variant(tmp_path, name, config=fields)
    with pytest.raises(ValueError) as error:
        tx.load_pretrained(folder)
    assert named in str(error.value)


def test_an_unknown_harmless_field_warns_and_strict_refuses_it(tmp_path):
    folder = variant(tmp_path, "llama", config={"colour": "green"})
    with pytest.warns(UserWarning, match="colour"):
        model = tx.load_pretrained(folder)
    assert difference("llama", model) <= TOLERANCE
    with pytest.raises(ValueError, match="colour"):
        tx.load_pretrained(folder, strict=True)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["llama", "bert", "t5"])
def test_strict_accepts_what_transformers_writes(name):
    tx.load_pretrained(cases.FILES / name, strict=True)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_that_are_published_are_understood(name):
    """Shapes only: nothing is allocated, whatever the size."""
    fields = PUBLISHED[name]
    family = FAMILIES[fields["model_type"]]
    options = table.Options(output=family.architectures[fields["architectures"][0]])
    config = Config(fields)
    model, _ = deferred.build_without_values(lambda: family.build(config, options))
    config.finish(strict=True)
    assert max(max(w.shape) for w in model.weights) == fields["vocab_size"]


@pytest.mark.parametrize(
    "file", ["../secret.safetensors", "/tmp/x.safetensors", "..", "a\\b", "c:x", 3]
)
def test_an_index_cannot_name_files_elsewhere(file, tmp_path):
    folder = variant(tmp_path, "llama")
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": file}}
    (folder / checkpoint.INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="its own folder"):
        tx.load_pretrained(folder)


def test_an_index_must_agree_with_its_files(tmp_path):
    folder = variant(tmp_path, "llama")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    index = {"weight_map": {"model.norm.weight": "a.safetensors"}}
    (folder / checkpoint.INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="disagree about"):
        tx.load_pretrained(folder)


def test_nothing_is_ever_unpickled(tmp_path):
    folder = variant(tmp_path, "llama")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model.bin.*pickled"):
        tx.load_pretrained(folder)


def test_a_damaged_file_is_refused(tmp_path):
    folder = variant(tmp_path, "llama")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    with pytest.raises(ValueError, match="not a sound safetensors file"):
        tx.load_pretrained(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not a readable JSON"):
        tx.load_pretrained(folder)


def test_a_folder_that_is_not_there_says_how_to_get_one():
    with pytest.raises(ValueError, match="download its folder"):
        tx.load_pretrained("gpt2-of-nowhere")


def test_quantized_weights_are_refused(tmp_path):
    def quantize(tensors):
        name = "model.layers.0.mlp.up_proj.weight"
        return {**tensors, name: tensors[name].astype("int8")}

    folder = variant(tmp_path, "llama", tensors=quantize)
    with pytest.raises(ValueError, match="stored as I8"):
        tx.load_pretrained(folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"vocab_size": 10**15},
        {"intermediate_size": 10**15},
        {"num_hidden_layers": 10**9},
    ],
    ids=str,
)
def test_sizes_are_checked_before_memory_is_taken(fields, tmp_path):
    """A petabyte would be noticed."""
    folder = variant(tmp_path, "llama", config=fields)
    with pytest.raises(ValueError, match=r"has the shape|more than the"):
        tx.load_pretrained(folder)
    # Nor is it left for Keras to make later.
    with keras.StatelessScope():
        pass


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("llama", {"output": "features"}, "takes no `output`"),
        ("bert", {"output": "logits"}, "gives one of"),
        ("bert_tokens", {"pooler": True}, "pooler=True"),
        ("distilbert_tokens", {"token_types": True}, "token types"),
        ("distilbert_tokens", {"output": "features", "pooler": True}, "pooler=True"),
        ("gpt2", {"token_types": True}, "token types"),
        ("t5", {"packed": True}, "packed=True"),
        ("llama", {"pad_id": 99}, "`pad_id` must be"),
    ],
    ids=str,
)
def test_options_without_a_use_are_refused(name, options, match):
    with pytest.raises(ValueError, match=match):
        tx.load_pretrained(cases.FILES / name, **options)


# ----------------------------------------------------------------------------
# Loaded models are ordinary models
# ----------------------------------------------------------------------------


def test_a_loaded_model_trains_saves_and_goes_back_out(tmp_path):
    model = tx.load_pretrained(cases.FILES / "bert_classes")
    inputs, _ = cases.load_expected("bert_classes")
    tokens, labels = inputs["tokens"], np.array([0, 3, 1])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss)
    before = model.evaluate(tokens, labels, verbose=0)
    model.fit(tokens, labels, epochs=8, verbose=0)
    assert model.evaluate(tokens, labels, verbose=0) < before
    outputs = run(model, inputs)

    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(run(again, inputs), outputs)
    assert again.name == "bert"

    tx.save_pretrained(again, tmp_path / "folder")
    back = tx.load_pretrained(tmp_path / "folder", strict=True)
    np.testing.assert_allclose(run(back, inputs), outputs, atol=1e-6)


def test_a_loaded_model_generates_what_its_logits_say(loaded):
    model = loaded("mistral")
    (text,) = tx.generate(model, [[5, 7, 11]], 4)
    logits = to_numpy(model(np.array([text])))[0]
    assert text[3:] == logits.argmax(-1)[2:-1].tolist()


def test_weights_keep_the_order_and_paths_of_a_built_model(loaded):
    """A file written from a loaded model opens in a model built by hand."""
    built = tx.decoder(
        cases.VOCAB,
        16,
        2,
        4,
        num_kv_heads=2,
        hidden_dim=22,
        window=3,
        norm=keras.layers.RMSNormalization(epsilon=1e-3),
        tie_embeddings=False,
    )
    paths = [w.path for w in loaded("mistral").weights]
    assert [w.path for w in built.weights] == paths
    built.set_weights(loaded("mistral").get_weights())
    assert difference("mistral", built) <= TOLERANCE


def test_values_come_after_shapes_and_seeds_start_as_they_would():
    def build():
        layer = keras.layers.Dense(3, name="dense")
        inputs = keras.Input((2,))
        return keras.Model(inputs, keras.layers.Dropout(0.5)(layer(inputs)))

    model, pending = deferred.build_without_values(build)
    assert [tuple(w.shape) for w in model.weights] == [(2, 3), (3,)]
    kernel = np.arange(6, dtype="float32").reshape(2, 3)
    deferred.fill(pending, {id(model.weights[0]): lambda: kernel})
    np.testing.assert_array_equal(model.get_weights()[0], kernel)
    np.testing.assert_array_equal(model.get_weights()[1], np.zeros(3))
    x = np.ones((1, 2), "float32")
    first, second = (to_numpy(model(x, training=True)) for _ in range(2))
    assert first.shape == second.shape == (1, 3)


MEMORY = """
import pathlib, sys
import numpy as np
import keras_tx as tx

def resident(field):
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split(field + ":")[1].split()[0]) * 1024

tx.load_pretrained(sys.argv[1])  # what a backend takes once
kept = []
for folder in sys.argv[2:]:
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    before = resident("VmRSS")
    kept.append(tx.load_pretrained(folder))
    size = sum(4 * int(np.prod(w.shape)) for w in kept[-1].weights)
    print((resident("VmHWM") - before) / size)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
def test_loading_takes_little_more_memory_than_the_model(tmp_path):
    rng = np.random.default_rng(0)
    for tied in (True, False):
        fields = {
            "model_type": "llama",
            "vocab_size": 9000,
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "tie_word_embeddings": tied,
        }
        folder = tmp_path / str(tied)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(fields))
        shapes = {"embed_tokens.weight": (9000, 512), "norm.weight": (512,)}
        if not tied:
            shapes["lm_head.weight"] = (9000, 512)
        for i in range(4):
            for name in "qkvo":
                shapes[f"layers.{i}.self_attn.{name}_proj.weight"] = (512, 512)
            shapes[f"layers.{i}.mlp.gate_proj.weight"] = (1024, 512)
            shapes[f"layers.{i}.mlp.up_proj.weight"] = (1024, 512)
            shapes[f"layers.{i}.mlp.down_proj.weight"] = (512, 1024)
            for name in ("input", "post_attention"):
                shapes[f"layers.{i}.{name}_layernorm.weight"] = (512,)
        tensors = {k: rng.standard_normal(s, "float32") for k, s in shapes.items()}
        safetensors_numpy.save_file(tensors, folder / "model.safetensors")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            MEMORY,
            cases.FILES / "llama",
            tmp_path / "True",
            tmp_path / "False",
        ],
        capture_output=True,
        text=True,
        cwd=cases.FILES.parent.parent,
    )
    assert done.returncode == 0, done.stderr
    tied, untied = map(float, done.stdout.split()[-2:])
    assert 0.5 < tied <= 1.3
    assert 0.5 < untied <= 1.3


# ----------------------------------------------------------------------------
# Out
# ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", cases.CASES)
def test_what_goes_out_comes_back_the_same(name, loaded, tmp_path):
    tx.save_pretrained(loaded(name), tmp_path)
    assert difference(name, tx.load_pretrained(tmp_path, **cases.CASES[name].options))
    written = safetensors_numpy.load_file(tmp_path / "model.safetensors")
    original = safetensors_numpy.load_file(cases.FILES / name / "model.safetensors")
    assert set(written) == set(original)
    for key, array in original.items():
        if name.startswith("roberta") and "position_embeddings" in key:
            array, written[key] = array[4:], written[key][4:]  # rows never read
        np.testing.assert_allclose(written[key], array, atol=2e-7, err_msg=key)


def built_here():
    """Models that a user would build, and the family that expresses each."""
    small = {"vocab_size": 31, "dim": 16, "num_layers": 2, "num_heads": 4}
    bert = {
        **small,
        "activation": "gelu",
        "gated": False,
        "use_bias": True,
        "norm": "layer",
        "norm_position": "post",
        "position": "learned",
        "max_length": 12,
        "embedding_norm": "layer",
        "num_segments": 2,
        "pad_id": 0,
    }
    return {
        "llama": lambda: tx.decoder(**small, dropout=0.1),
        "mistral": lambda: tx.decoder(**small, num_kv_heads=1, window=5),
        "qwen2": lambda: tx.decoder(
            31, 16, 2, block=lambda i: block(tx.MultiHead(4, use_bias="qkv"))
        ),
        "qwen3": lambda: tx.decoder(
            31,
            16,
            2,
            block=lambda i: block(
                tx.MultiHead(4, 6, use_bias=False, query_key_norm="rms")
            ),
        ),
        "gpt2": lambda: tx.decoder(
            **small,
            activation="gelu_tanh",
            gated=False,
            use_bias=True,
            norm="layer",
            position="learned",
            max_length=12,
            dropout=0.1,
        ),
        "bert": lambda: tx.encoder(
            **bert, output="tokens", transform="gelu", output_bias=True
        ),
        "t5": lambda: tx.encoder_decoder(
            31,
            16,
            2,
            encoder_block=lambda i: t5_block(),
            decoder_block=lambda i: t5_block(cross=True),
            position=tx.RelativePosition(4),
            pad_id=0,
            mask_target=False,
            tie_embeddings=False,
        ),
    }


def block(attention, **options):
    return tx.TransformerBlock(
        attention,
        tx.FeedForward(20, "silu", gated=True, use_bias=False),
        norm="rms",
        **options,
    )


def t5_block(cross=False):
    def heads():
        attention = tx.ScaledAttention(1.0)
        return tx.MultiHead(4, 6, attention=attention, use_bias=False)

    return block(heads(), cross_attention=heads() if cross else None)


@pytest.mark.parametrize("family", built_here())
def test_a_model_built_here_finds_its_family(family, tmp_path):
    model = built_here()[family]()
    tx.save_pretrained(model, tmp_path, config={"eos_token_id": 2})
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == family
    assert config["eos_token_id"] == 2
    again = tx.load_pretrained(tmp_path)
    tokens = np.arange(1, 11).reshape(2, 5)
    if family == "t5":
        tokens = {"source": tokens, "target": tokens + 3}
    np.testing.assert_allclose(
        to_numpy(again(tokens)), to_numpy(model(tokens)), atol=1e-5
    )


SMALL = {"vocab_size": 31, "dim": 16, "num_layers": 1, "num_heads": 4}


@pytest.mark.parametrize(
    ("make", "obstacle"),
    [
        (lambda: tx.decoder(**SMALL, position="alibi"), "AlibiPosition"),
        (lambda: tx.decoder(**SMALL, position=None), "position"),
        (lambda: tx.decoder(**SMALL, position="sinusoidal"), "position"),
        (
            lambda: tx.decoder(
                **SMALL, position=tx.RotaryPosition(layout="interleaved")
            ),
            "interleaved",
        ),
        (
            lambda: tx.decoder(**SMALL, position=tx.RotaryPosition(rotary_dim=2)),
            "rotary_dim",
        ),
        (lambda: tx.decoder(**SMALL, norm_position="sandwich"), "norm"),
        (lambda: tx.decoder(**SMALL, embedding_scale=2.0), "embedding_scale"),
        (lambda: tx.decoder(**SMALL, logit_cap=5.0), "soft_cap"),
        (lambda: tx.decoder(**SMALL, output_bias=True), "use_bias"),
        (lambda: tx.decoder(**SMALL, final_norm=None), "final_norm"),
        (lambda: tx.decoder(**SMALL, activation="elu"), "elu"),
        (
            lambda: tx.decoder(
                31, 16, 1, block=lambda i: block(tx.MultiHead(4), residual="parallel")
            ),
            "residual",
        ),
        (
            lambda: tx.decoder(
                31, 16, 2, block=lambda i: block(tx.MultiHead(2 + 2 * i, 4))
            ),
            "num_heads",
        ),
        (lambda: tx.encoder(**SMALL), "inputs"),
        (lambda: tx.encoder_decoder(**SMALL), "position"),
    ],
)
def test_a_model_that_no_family_expresses_is_refused_by_its_option(
    make, obstacle, tmp_path
):
    with pytest.raises(ValueError) as error:
        tx.save_pretrained(make(), tmp_path / "folder")
    assert obstacle in str(error.value)
    assert not (tmp_path / "folder").exists()


def test_static_ntk_scaling_goes_out_as_another_base(tmp_path):
    scaling = tx.NtkScaling(4.0)
    model = tx.decoder(31, 16, 1, 2, position=tx.RotaryPosition(500.0, scaling=scaling))
    tx.save_pretrained(model, tmp_path)
    tokens = np.arange(20)[None]
    np.testing.assert_allclose(
        to_numpy(tx.load_pretrained(tmp_path)(tokens)),
        to_numpy(model(tokens)),
        atol=1e-6,
    )


def test_only_functional_models_go_out(tmp_path):
    class Own(keras.Model):
        def call(self, x):
            return x

    with pytest.raises(ValueError, match="writes models of"):
        tx.save_pretrained(Own(), tmp_path)


def test_a_family_can_be_asked_for_by_name(tmp_path, loaded):
    tx.save_pretrained(loaded("llama"), tmp_path, family="mistral")
    assert json.loads((tmp_path / "config.json").read_text())["sliding_window"] is None
    with pytest.raises(ValueError, match=r"gpt2.*'embedding|Nearest is gpt2"):
        tx.save_pretrained(loaded("llama"), tmp_path, family="gpt2")
    with pytest.raises(ValueError, match="keras_tx knows"):
        tx.save_pretrained(loaded("llama"), tmp_path, family="mamba")


def test_only_harmless_fields_are_added(tmp_path, loaded):
    for field in ("rms_norm_eps", "pad_token_id", "model_type"):
        with pytest.raises(ValueError, match=field):
            tx.save_pretrained(loaded("llama"), tmp_path, config={field: 1})


def test_a_failure_leaves_what_was_there(tmp_path, loaded, monkeypatch):
    folder = tmp_path / "folder"
    tx.save_pretrained(loaded("llama"), folder)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}

    def fail(*arguments, **options):
        raise OSError("no space left")

    monkeypatch.setattr(safetensors_numpy, "save_file", fail)
    with pytest.raises(OSError, match="no space"):
        tx.save_pretrained(loaded("qwen2"), folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_stale_weights_beside_the_new_ones_are_refused(tmp_path, loaded):
    (tmp_path / "pytorch_model.bin").write_bytes(b"old")
    with pytest.raises(ValueError, match=r"pytorch_model.bin"):
        tx.save_pretrained(loaded("llama"), tmp_path)


def test_large_models_go_out_in_shards(tmp_path, loaded, monkeypatch):
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 6000)
    tx.save_pretrained(loaded("llama"), tmp_path)
    index = json.loads((tmp_path / checkpoint.INDEX).read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert difference("llama", tx.load_pretrained(tmp_path)) <= TOLERANCE


# ----------------------------------------------------------------------------
# Forms
# ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "shapes", "file_shape"),
    [
        (table.SAME, [(3, 4)], (3, 4)),
        (table.FLAT, [(3, 4)], (12,)),
        (table.LINEAR, [(5, 3, 4)], (12, 5)),
        (table.LINEAR_FROM_HEADS, [(3, 4, 5)], (5, 12)),
        (table.Matrix(transposed=False), [(5, 3, 4)], (5, 12)),
        (table.PlusOne(), [(4,)], (4,)),
        (table.SkipRows(2), [(3, 4)], (5, 4)),
        (
            table.Joined(table.Matrix(transposed=False)),
            [(5, 3, 4), (5, 1, 4), (5, 1, 4)],
            (5, 20),
        ),
        (table.Joined(table.FLAT), [(3, 4), (1, 4)], (16,)),
    ],
    ids=str,
)
def test_forms_are_undone_by_their_inverse(form, shapes, file_shape):
    rng = np.random.default_rng(0)
    ours = [rng.integers(0, 9, shape).astype("float32") for shape in shapes]
    saved = form.save(ours)
    assert saved.shape == form.file_shape(*shapes) == file_shape
    for mine, back in zip(ours, form.load(saved, shapes), strict=True):
        np.testing.assert_array_equal(mine, back)


# ----------------------------------------------------------------------------
# Options that the builders have for the sake of families
# ----------------------------------------------------------------------------


def test_a_target_that_starts_with_padding_is_seen_on_request():
    def build(**options):
        return tx.encoder_decoder(31, 16, 1, 4, pad_id=0, **options)

    seen, hidden = build(mask_target=False), build()
    hidden.set_weights(seen.get_weights())
    source = np.array([[3, 4, 5, 0]])
    target = np.array([[0, 7, 8]])
    plain = tx.encoder_decoder(31, 16, 1, 4)
    plain.set_weights(seen.get_weights())
    logits = to_numpy(seen({"source": source, "target": target}))
    # The source is masked still; in a target of real tokens nothing changes.
    short = to_numpy(plain({"source": source[:, :3], "target": target}))
    np.testing.assert_allclose(logits, short, atol=1e-6)
    assert np.abs(logits - to_numpy(hidden({"source": source, "target": target}))).max()
    with pytest.raises(ValueError, match="mask_target"):
        tx.encoder_decoder(31, 16, 1, 4, mask_target=False)


def test_a_classifier_has_a_dropout_of_its_own():
    model = tx.encoder(
        **SMALL, output="classes", num_classes=3, dropout=0.1, pooled_dropout=0.3
    )
    assert model.get_layer("pooled_dropout").rate == 0.3
    assert model.get_layer("embedding_dropout").rate == 0.1
    with pytest.raises(ValueError, match="pooled_dropout"):
        tx.encoder(**SMALL, pooled_dropout=0.3)


# ----------------------------------------------------------------------------
# Against transformers, where it is installed
# ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def transformers():
    pytest.importorskip("torch")
    return pytest.importorskip("transformers")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", cases.FAMILIES)
def test_random_configurations_agree_both_ways(family, seed, transformers, tmp_path):
    case = cases.random_case(family, seed)
    reference = cases.make_reference(case, seed)
    reference.save_pretrained(tmp_path / "theirs")
    inputs = cases.make_inputs(case, seed)
    padding = cases.padding_of(case)
    expected = cases.run_reference(reference, inputs, padding)
    model = tx.load_pretrained(tmp_path / "theirs", **case.options)
    worst, scale = cases.largest_difference(case, inputs, run(model, inputs), expected)
    assert worst <= TOLERANCE * max(scale, 1.0)

    tx.save_pretrained(model, tmp_path / "ours")
    cls = type(reference)
    again, report = cls.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    back = cases.run_reference(again.eval(), inputs, padding)
    for name, array in expected.items():
        np.testing.assert_allclose(back[name], array, atol=1e-5 * max(scale, 1.0))


@pytest.mark.parametrize("family", built_here())
def test_transformers_loads_what_was_built_here(family, transformers, tmp_path):
    model = built_here()[family]()
    # Larger than they start, so that no layer is nearly the identity.
    rng = np.random.default_rng(0)
    model.set_weights(
        [w + 0.2 * rng.standard_normal(w.shape, "float32") for w in model.get_weights()]
    )
    tx.save_pretrained(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    cls = getattr(transformers, config["architectures"][0])
    reference = cls.from_pretrained(tmp_path).eval()
    tokens = np.arange(1, 11).reshape(2, 5)
    inputs = {"tokens": tokens}
    if family == "t5":
        inputs = {"source": tokens, "target": tokens + 3}
    expected = cases.run_reference(reference, inputs, None)["logits"]
    np.testing.assert_allclose(run(model, inputs), expected, atol=1e-5)


# ----------------------------------------------------------------------------
# GGUF
# ----------------------------------------------------------------------------


def write_gguf(path, name, *, architecture="llama", extra=(), tokenizer=True):
    """Writes a reference of the family llama as a GGUF file.

    Args:
        path: Where to.
        name: Name of the case.
        architecture: What to call it.
        extra: Further `(method of the writer, arguments)`.
        tokenizer: Whether to put a tokenizer of letters inside.
    """
    gguf = pytest.importorskip("gguf")
    config = json.loads((cases.FILES / name / "config.json").read_text())
    tensors = safetensors_numpy.load_file(cases.FILES / name / "model.safetensors")
    heads = config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for method, *arguments in extra:
        getattr(writer, method)(*arguments)
    if tokenizer:
        tokens = [chr(ord("a") + i) for i in range(26)] + ["Ġ", "<end>", "ab", "abc"]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(tokens)
        writer.add_token_types([1] * 27 + [3] + [1] * 2)
        writer.add_token_merges(["a b", "ab c"])
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attn_output",
        "self_attn.": "attn_",
        "mlp.": "ffn_",
        "_proj": "",
        "model.layers.": "blk.",
    }
    for key, array in tensors.items():
        for kind, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if kind in key:  # features of a pair side by side
                pairs = array.reshape(count, 2, -1, *array.shape[1:])
                array = pairs.swapaxes(1, 2).reshape(array.shape)
        for old, new in names.items():
            key = key.replace(old, new)
        writer.add_tensor(key, array.astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_gives_the_numbers_of_the_reference(tmp_path):
    file = write_gguf(tmp_path / "model.gguf", "llama")
    assert difference("llama", tx.load_pretrained(file)) <= TOLERANCE


def test_a_gguf_file_brings_its_tokenizer(tmp_path):
    pytest.importorskip("tokenizers")
    tokenizer = tx.load_tokenizer(write_gguf(tmp_path / "model.gguf", "llama"))
    ids = tokenizer.encode("abcab d<end>").ids
    assert ids == [29, 28, 26, 3, 27]
    assert tokenizer.decode(ids) == "abcab d"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"architecture": "qwen2"}, "architecture 'qwen2'"),
        (
            {"extra": [("add_float32", "llama.rope.scaling.factor", 2.0)]},
            "rope_scaling_factor",
        ),
        ({"extra": [("add_uint32", "llama.expert_count", 8)]}, "expert_count"),
        (
            {"extra": [("add_tensor", "rope_freqs.weight", np.ones(3, "float32"))]},
            "rope_freqs.weight' has no place",
        ),
    ],
    ids=["architecture", "scaling", "experts", "frequencies"],
)
def test_gguf_files_of_other_arithmetic_are_refused(options, match, tmp_path):
    file = write_gguf(tmp_path / "model.gguf", "llama", **options)
    with pytest.raises(ValueError, match=match):
        tx.load_pretrained(file)


def test_a_damaged_gguf_file_is_refused(tmp_path):
    pytest.importorskip("gguf")
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(ValueError, match="not a sound GGUF file"):
        tx.load_pretrained(tmp_path / "model.gguf")
