"""T5, Gemma 2, BERT and Llama: the shapes on which a file format breaks first."""

import numpy as np
import pytest
from contract import array, check_layer, paths, randomize
from hard_models import HARD_MODELS, bert, gemma2, llama, t5

B, T, S, V = 3, 5, 7, 31
KEY_BIAS = ("key/bias",)  # softmax does not see what is added to all keys alike


def integers(low, high, *shape):
    return np.random.default_rng(7).integers(low, high, shape).astype("int32")


TOKENS = {"tokens": integers(1, V, B, T)}
INPUTS = {
    "t5": {"target": integers(1, V, B, T), "source": integers(1, V, B, S)},
    "gemma2": TOKENS,
    "bert": {**TOKENS, "token_types": np.sort(integers(0, 2, B, T))},
    "llama": TOKENS,
}
KEYWORDS = {
    # Unscaled scores are large, and so is what rounding does to them.
    "t5": {"padded": ("target", "source"), "causal": True, "rough": 32},
    "gemma2": {"padded": ("tokens",), "causal": True},
    "bert": {"padded": ("tokens",), "still": KEY_BIAS},
    "llama": {"padded": ("tokens",), "causal": True},
}


@pytest.mark.parametrize("name", HARD_MODELS)
def test_the_hardest_models_keep_the_contract(name, process):
    check_layer(
        HARD_MODELS[name],
        INPUTS[name],
        process=process,
        lengths=(T, S),
        wide=True,
        mixes=True,
        optimizer=name != "bert",  # it has dropout
        **KEYWORDS[name],
    )


# Files hold these names for ever. Written out, for a list made by the code that
# is tested would follow it wherever it goes.
BLOCK = {
    "t5": """
        attention_norm/scale
        attention/query/kernel attention/key/kernel attention/value/kernel
        attention/merge/kernel
        feed_forward_norm/scale
        feed_forward/widen/kernel feed_forward/gate/kernel
        feed_forward/narrow/kernel
    """,
    "t5 decoder": """
        attention_norm/scale
        attention/query/kernel attention/key/kernel attention/value/kernel
        attention/merge/kernel
        cross_attention_norm/scale
        cross_attention/query/kernel cross_attention/key/kernel
        cross_attention/value/kernel cross_attention/merge/kernel
        feed_forward_norm/scale
        feed_forward/widen/kernel feed_forward/gate/kernel
        feed_forward/narrow/kernel
    """,
    "gemma2": """
        attention_norm/scale attention_output_norm/scale
        attention/query/kernel attention/key/kernel attention/value/kernel
        attention/merge/kernel
        feed_forward_norm/scale feed_forward_output_norm/scale
        feed_forward/widen/kernel feed_forward/gate/kernel
        feed_forward/narrow/kernel
    """,
    "bert": """
        attention_norm/gamma attention_norm/beta
        attention/query/kernel attention/query/bias
        attention/key/kernel attention/key/bias
        attention/value/kernel attention/value/bias
        attention/merge/kernel attention/merge/bias
        feed_forward_norm/gamma feed_forward_norm/beta
        feed_forward/widen/kernel feed_forward/widen/bias
        feed_forward/narrow/kernel feed_forward/narrow/bias
    """,
}


def blocks(kind, prefix, count):
    return [
        f"{prefix}_{index}/{path}"
        for index in range(count)
        for path in BLOCK[kind].split()
    ]


PATHS = {
    "t5": [
        "embedding/embeddings",
        "encoder_position/embeddings",
        *blocks("t5", "encoder_block", 3),
        "encoder_final_norm/scale",
        "decoder_position/embeddings",
        *blocks("t5 decoder", "decoder_block", 2),
        "decoder_final_norm/scale",
    ],
    "gemma2": [
        "embedding/embeddings",
        *blocks("gemma2", "block", 3),
        "final_norm/scale",
    ],
    "bert": [
        "embedding/embeddings",
        "embedding/bias",
        "segment/embeddings",
        "position/embeddings",
        "embedding_norm/gamma",
        "embedding_norm/beta",
        *blocks("bert", "block", 2),
        "transform/kernel",
        "transform/bias",
        "transform_norm/gamma",
        "transform_norm/beta",
    ],
    "llama": [
        "embedding/embeddings",
        "embedding/reverse_embeddings",
        *blocks("t5", "block", 2),
        "final_norm/scale",
    ],
}


@pytest.mark.parametrize("name", HARD_MODELS)
def test_variables_have_the_names_that_files_know(name):
    assert sorted(paths(HARD_MODELS[name]())) == sorted(PATHS[name])


def test_t5_has_one_bias_table_a_stack_evaluated_once():
    model = t5()
    tables = [p for p in paths(model) if p.endswith("position/embeddings")]
    assert tables == ["encoder_position/embeddings", "decoder_position/embeddings"]
    encoder, decoder = (
        model.get_layer(f"{stack}_position") for stack in ("encoder", "decoder")
    )
    assert encoder.bidirectional and not decoder.bidirectional
    assert len(encoder._inbound_nodes) == len(decoder._inbound_nodes) == 1
    # Every block hears of it: without its table all self-attention changes.
    before = array(model(INPUTS["t5"]))
    encoder.embeddings.assign(encoder.embeddings + 5 * np.eye(8, 4, dtype="float32"))
    assert (array(model(INPUTS["t5"])) != before).any()


def test_gemma_2_looks_back_through_windows_in_every_second_block():
    model = gemma2()
    windows = [
        model.get_layer(f"block_{index}").attention.attention.window
        for index in range(3)
    ]
    assert windows == [3, None, 3]
    randomize(model, np.random.default_rng(0))
    logits = array(model(TOKENS["tokens"]))
    assert np.abs(logits).max() <= 30.0


def test_bert_tells_its_two_sentences_apart():
    model = bert()
    randomize(model, np.random.default_rng(0))
    first = array(model(INPUTS["bert"]))
    same = {**INPUTS["bert"], "token_types": np.zeros((B, T), "int32")}
    assert (array(model(same)) != first).any()


def test_llama_groups_its_heads_and_frees_its_head():
    model = llama()
    shapes = {v.path: tuple(v.shape) for v in model.weights}
    assert shapes["block_1/attention/query/kernel"] == (16, 4, 4)
    assert shapes["block_1/attention/key/kernel"] == (16, 2, 4)
    assert shapes["embedding/reverse_embeddings"] == (16, 31)


def test_no_token_of_t5_sees_a_later_target_and_all_see_the_whole_source():
    model = t5()
    randomize(model, np.random.default_rng(0))
    inputs = INPUTS["t5"]
    before = array(model(inputs))
    target = inputs["target"].copy()
    target[:, 3] = target[:, 3] % (V - 1) + 1
    after = array(model({**inputs, "target": target}))
    np.testing.assert_array_equal(after[:, :3], before[:, :3])
    assert (after[:, 3:] != before[:, 3:]).any(axis=-1).all()
    source = inputs["source"].copy()
    source[:, -1] = source[:, -1] % (V - 1) + 1
    after = array(model({**inputs, "source": source}))
    assert (after != before).any(axis=-1).all()


def test_a_model_built_twice_differs_in_nothing_but_its_numbers():
    for make in HARD_MODELS.values():
        first, second = make().get_config(), make().get_config()
        assert first == second
