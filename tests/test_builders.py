"""What the builders promise, beyond the contract that their models keep."""

import inspect
import math
import re

import keras
import numpy as np
import pytest
from contract import array, paths, randomize
from user_layers import Shifted, TemperedMultiHead

import keras_tx as tx

B, T, S, D, N, V = 3, 6, 7, 24, 4, 31


def tokens(*shape):
    shape = shape or (B, T)
    return np.random.default_rng(7).integers(1, V, shape).astype("int32")


def moved(model):
    randomize(model, np.random.default_rng(0))
    return model


def values(model):
    return {v.path: array(v.value) for v in model.weights}


# ----------------------------------------------------------------------------
# Causality
# ----------------------------------------------------------------------------

BLOCKS = {
    "says it is not causal": lambda: tx.TransformerBlock(N, 28, causal=False),
    "window": lambda: tx.TransformerBlock(
        tx.MultiHead(N, attention=tx.ScaledAttention(window=3)), 28
    ),
    "parallel": lambda: tx.TransformerBlock(N, 28, residual="parallel"),
    "sandwich": lambda: tx.TransformerBlock(N, 28, norm_position="sandwich"),
    "post": lambda: tx.TransformerBlock(N, 28, norm_position="post"),
    "without residual": lambda: tx.TransformerBlock(N, 28, residual="none"),
    "relative": lambda: tx.TransformerBlock(
        tx.MultiHead(
            N, position=tx.RelativePosition(N, num_buckets=8, max_distance=16)
        ),
        28,
    ),
    "alibi": lambda: tx.TransformerBlock(
        tx.MultiHead(N, position=tx.AlibiPosition(N)), 28
    ),
    "grouped, normed, capped": lambda: tx.TransformerBlock(
        tx.MultiHead(
            N,
            num_kv_heads=2,
            query_key_norm="rms",
            attention=tx.ScaledAttention(soft_cap=2.0),
        ),
        28,
    ),
    "a user's attention": lambda: tx.TransformerBlock(TemperedMultiHead(N), 28),
    "a causal convolution": lambda: tx.TransformerBlock(
        N, keras.layers.Conv1D(D, 3, padding="causal")
    ),
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_no_token_sees_a_later_one_whatever_the_block(kind):
    model = moved(
        tx.decoder(V, D, 2, block=lambda index: BLOCKS[kind](), position=None)
    )
    before = array(model(tokens()))
    now = 3
    changed = tokens()
    changed[:, now:] = changed[:, now:] % (V - 1) + 1
    after = array(model(changed))
    np.testing.assert_array_equal(after[:, :now], before[:, :now])
    assert (after[:, now:] != before[:, now:]).any(axis=-1).all()


LEAKS = {
    "a look ahead": lambda: tx.TransformerBlock(N, Shifted()),
    "a convolution": lambda: tx.TransformerBlock(
        N, keras.layers.Conv1D(D, 3, padding="same")
    ),
    "attention as feed-forward": lambda: tx.TransformerBlock(
        N, keras.Sequential([keras.layers.Dense(D), TemperedMultiHead(N)])
    ),
    "a norm over time": lambda: tx.TransformerBlock(
        N, 28, norm=keras.layers.GroupNormalization(groups=1)
    ),
}


@pytest.mark.parametrize("kind", LEAKS)
def test_a_block_that_cannot_be_told_to_be_causal_is_refused(kind):
    with pytest.raises(ValueError, match="The future leaks"):
        tx.decoder(V, D, 1, block=lambda index: LEAKS[kind](), position=None)


def test_a_leak_in_the_target_of_an_encoder_decoder_is_refused():
    def build(cross_feed_forward):
        return tx.encoder_decoder(
            V,
            D,
            1,
            encoder_block=lambda index: tx.TransformerBlock(N, Shifted()),
            decoder_block=lambda index: tx.TransformerBlock(
                N, cross_feed_forward, cross_attention=N
            ),
            position=None,
        )

    build(tx.FeedForward(28))  # an encoder may look ahead
    with pytest.raises(ValueError, match="The future leaks"):
        build(Shifted())


def test_every_target_token_sees_every_source_token_and_no_later_target():
    model = moved(tx.encoder_decoder(V, D, 2, N))
    inputs = {"source": tokens(B, S), "target": tokens(B, T)}
    before = array(model(inputs))
    for place in range(S):
        source = inputs["source"].copy()
        source[:, place] = source[:, place] % (V - 1) + 1
        after = array(model({**inputs, "source": source}))
        assert (after != before).any(axis=-1).all()
    target = inputs["target"].copy()
    target[:, 4] = target[:, 4] % (V - 1) + 1
    after = array(model({**inputs, "target": target}))
    np.testing.assert_array_equal(after[:, :4], before[:, :4])
    assert (after[:, 4:] != before[:, 4:]).any(axis=-1).all()


# ----------------------------------------------------------------------------
# Initial values
# ----------------------------------------------------------------------------


def into_residual(path):
    return path.endswith(("merge/kernel", "narrow/kernel"))


@pytest.mark.parametrize("stddev", [0.02, 0.05])
def test_kernels_start_as_in_gpt_2(stddev):
    layers = 8
    model = tx.decoder(V, 96, layers, N, use_bias=True, init_stddev=stddev)
    kernels = 0
    for path, value in values(model).items():
        if path.endswith("bias"):
            assert not value.any(), path
        elif path.endswith("scale"):
            assert (value == 1).all(), path
        else:
            kernels += 1
            expected = stddev / math.sqrt(2 * layers if into_residual(path) else 1)
            error = 4 / math.sqrt(2 * value.size)  # four standard errors
            assert abs(value.std() / expected - 1) < error, path
            assert abs(value.mean()) < 4 * expected / math.sqrt(value.size), path
    assert kernels == 1 + 7 * layers


def test_each_stack_of_an_encoder_decoder_counts_its_own_layers():
    model = tx.encoder_decoder(V, 96, 2, N, num_encoder_layers=8)
    for path, value in values(model).items():
        if into_residual(path):
            layers = 8 if path.startswith("encoder") else 2
            expected = 0.02 / math.sqrt(2 * layers)
            assert abs(value.std() / expected - 1) < 0.05, path


def assert_no_two_alike(model):
    kernels = [(p, x) for p, x in values(model).items() if x.ndim > 1 and x.std() > 0]
    streams = {}
    for path, value in kernels:
        # One stream of numbers looks alike in any shape and scale.
        start = np.ravel(value)[:16] / value.std()
        for other, known in streams.items():
            assert np.abs(start - known).max() > 0.1, (path, other)
        streams[path] = start
    assert len(streams) > 10


def test_no_two_kernels_start_equal():
    assert_no_two_alike(tx.decoder(D, D, 2, N, hidden_dim=D, tie_embeddings=False))
    assert_no_two_alike(
        tx.encoder_decoder(D, D, 1, N, share_embeddings=False, position="relative")
    )


def test_a_seeded_initializer_gives_each_kernel_numbers_of_its_own():
    initializer = keras.initializers.RandomNormal(stddev=0.1, seed=3)

    def block(index):
        return tx.TransformerBlock(
            tx.MultiHead(N, kernel_initializer=initializer),
            tx.FeedForward(D, gated=True, kernel_initializer=initializer),
        )

    def build():
        return tx.decoder(V, D, 2, block=block)

    assert_no_two_alike(build())
    first, second = values(build()), values(build())
    for path in first:
        if "block_" in path:  # they follow from the seed all the same
            np.testing.assert_array_equal(first[path], second[path])


def test_one_block_returned_for_every_layer_is_copied_for_each():
    block = tx.TransformerBlock(N, 28)
    model = tx.decoder(V, D, 3, block=lambda index: block)
    assert_no_two_alike(model)
    assert not block.built


def test_the_same_random_seed_makes_the_same_model():
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(11)
        models.append(values(tx.decoder(V, D, 1, N, position="relative")))
    for path in models[0]:
        np.testing.assert_array_equal(models[0][path], models[1][path])


@pytest.mark.parametrize("depth", [2, 24])
def test_a_deep_stack_starts_with_the_activations_and_the_loss_of_a_shallow_one(depth):
    model = tx.decoder(V, 48, depth, N, embedding_scale="sqrt")
    last = model.get_layer(f"block_{depth - 1}").output
    stream = array(keras.Model(model.inputs, last)(tokens()))
    start = 0.02 * math.sqrt(48)  # of embeddings times the square root of D
    assert 0.9 < stream.std() / start < 1.6
    logits = array(model(tokens())).astype("float64")
    loss = np.log(np.exp(logits).sum(-1)) - logits[..., 1]
    assert abs(loss.mean() / math.log(V) - 1) < 0.05


def test_gradients_reach_the_first_of_24_blocks_undiminished():
    model = tx.decoder(V, 16, 24, 2)
    before = values(model)
    model.compile(
        keras.optimizers.SGD(1.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        run_eagerly=keras.backend.backend() != "jax",
        jit_compile=False,
    )
    model.train_on_batch(tokens(), tokens())
    sizes = [
        sum(
            np.square(array(v.value) - before[v.path]).sum()
            for v in model.get_layer(f"block_{index}").trainable_weights
        )
        for index in range(24)
    ]
    assert max(sizes) / min(sizes) < 100


# ----------------------------------------------------------------------------
# Dropout
# ----------------------------------------------------------------------------


def dropped(seed, name="block"):
    block = tx.TransformerBlock(
        tx.MultiHead(N, attention=tx.ScaledAttention(dropout=0.3, seed=seed)),
        tx.FeedForward(28, dropout=0.3, seed=seed),
        dropout=0.3,
        seed=seed,
        name=name,
    )
    x = np.random.default_rng(0).normal(size=(B, T, D)).astype("float32")
    block.build(x.shape)
    for v, value in zip(block.weights, kept_weights(block), strict=True):
        v.assign(value)
    return array(block(x, training=True)), array(block(x, training=False))


def kept_weights(block):
    rng = np.random.default_rng(1)
    return [rng.normal(0, 0.2, v.shape).astype("float32") for v in block.weights]


def test_a_seed_makes_dropout_reproducible():
    first, plain = dropped(5)
    np.testing.assert_array_equal(first, dropped(5)[0])
    assert (first != dropped(6)[0]).any()
    assert (first != plain).any()


def test_two_blocks_of_one_seed_drop_different_features():
    assert (dropped(5, "block_0")[0] != dropped(5, "block_1")[0]).any()


def test_branches_of_one_block_drop_different_features():
    block = tx.TransformerBlock(N, 28, dropout=0.5, seed=2, name="block")
    ones = np.ones((B, T, D), "float32")
    block(ones)
    first, second = (
        array(getattr(block, f"{branch}_dropout")(ones, training=True))
        for branch in block.branches
    )
    assert (first != second).any()


def test_the_same_random_seed_drops_the_same_in_a_whole_model():
    outputs = []
    for _ in range(2):
        keras.utils.set_random_seed(4)
        model = tx.decoder(V, D, 1, N, dropout=0.2)
        outputs.append(array(model(tokens(), training=True)))
    np.testing.assert_array_equal(*outputs)
    assert (array(model(tokens(), training=False)) != outputs[0]).any()


# ----------------------------------------------------------------------------
# Sizes
# ----------------------------------------------------------------------------


def test_a_tied_head_costs_nothing_and_a_free_one_a_table():
    def count(**options):
        return tx.decoder(V, D, 2, N, hidden_dim=28, **options).count_params()

    block = 4 * D * D + 3 * D * 28 + 2 * D
    tied = V * D + 2 * block + D
    assert count() == tied
    assert count(output_bias=True) == tied + V
    assert count(tie_embeddings=False) == tied + V * D
    biases = 2 * (4 * D + 28 + D)
    plain = V * D + 2 * (4 * D * D + 2 * D * 28 + 2 * D) + D + biases
    assert count(gated=False, use_bias=True) == plain
    grouped = 2 * 2 * D * (D // 2)
    assert count(num_kv_heads=2) == tied - grouped
    assert count(position="learned", max_length=20) == tied + 20 * D
    assert count(position="relative") == tied + 32 * N
    assert count(position="sinusoidal") == count(position="alibi") == tied


def test_an_encoder_decoder_shares_its_table_where_there_is_one_vocabulary():
    def count(*arguments, **options):
        model = tx.encoder_decoder(*arguments, D, 1, N, hidden_dim=28, **options)
        return model.count_params()

    shared = count(V)
    assert count(V, share_embeddings=False) == shared + V * D
    assert count(V, target_vocab_size=37) == shared + 37 * D
    assert count(V, tie_embeddings=False) == shared + V * D


def test_a_gate_changes_the_number_of_weights_by_rounding_only():
    gated = tx.decoder(V, D, 2, N).count_params()
    plain = tx.decoder(V, D, 2, N, gated=False).count_params()
    assert gated == plain
    assert tx.decoder(V, 32, 1, N).get_layer("block_0").feed_forward.hidden_dim == 88


def summary(model):
    lines = []
    model.summary(print_fn=lambda line, **_: lines.append(line), line_length=120)
    return "\n".join(lines)


def test_the_summary_shows_real_shapes_and_exact_counts():
    model = tx.encoder_decoder(V, D, 1, N, target_vocab_size=37, position="relative")
    text = summary(model)
    for shape in ("(None, None, 24)", "(None, None, 37)", "(1, 4, None, None)"):
        assert shape in text
    assert "?" not in text
    total = re.search(r"Total params: ([\d,]+)", text).group(1)
    exact = sum(x.size for x in values(model).values())
    assert int(total.replace(",", "")) == exact == model.count_params()


# ----------------------------------------------------------------------------
# Packing
# ----------------------------------------------------------------------------

PACKED = {
    "rotary": {"position": "rotary"},
    "sinusoidal": {"position": "sinusoidal"},
    "learned": {"position": "learned", "max_length": 8},
    "relative": {"position": "relative"},
    "alibi": {"position": "alibi"},
    "windowed": {"position": "rotary", "window": 2},
}


@pytest.mark.parametrize("kind", PACKED)
def test_documents_in_one_row_do_not_see_each_other(kind):
    model = moved(tx.decoder(V, D, 2, N, packed=True, **PACKED[kind]))
    first, second = tokens(1, 6)[:, :2], tokens(1, 7)[:, 2:]

    def run(*documents):
        return array(
            model(
                {
                    "tokens": np.concatenate(documents, axis=1),
                    "positions": np.concatenate(
                        [np.arange(x.shape[1]) for x in documents]
                    )[None].astype("int32"),
                    "segment_ids": np.concatenate(
                        [np.full(x.shape, i) for i, x in enumerate(documents)], axis=1
                    ).astype("int32"),
                }
            )
        )

    together = run(first, second)
    for alone, here in (
        (run(first), together[:, :2]),
        (run(second), together[:, 2:]),
    ):
        np.testing.assert_allclose(here, alone, rtol=1e-5, atol=1e-5)
    other = run(first % (V - 1) + 1, second)
    np.testing.assert_array_equal(other[:, 2:], together[:, 2:])


def test_a_packed_encoder_separates_documents_too():
    model = moved(tx.encoder(V, D, 1, N, packed=True))
    inputs = {
        "tokens": tokens(1, 5),
        "positions": np.array([[0, 1, 0, 1, 2]], "int32"),
        "segment_ids": np.array([[4, 4, 9, 9, 9]], "int32"),
    }
    before = array(model(inputs))
    changed = inputs["tokens"].copy()
    changed[:, -1] = changed[:, -1] % (V - 1) + 1
    after = array(model({**inputs, "tokens": changed}))
    np.testing.assert_array_equal(after[:, :2], before[:, :2])
    assert (after[:, 2:] != before[:, 2:]).any(axis=-1).all()


# ----------------------------------------------------------------------------
# Names, templates, refusals
# ----------------------------------------------------------------------------


def test_layers_have_the_names_that_the_documentation_gives():
    names = [layer.name for layer in tx.decoder(V, D, 2, N, dropout=0.1).layers]
    assert names == [
        "tokens",
        "embedding",
        "embedding_dropout",
        "block_0",
        "block_1",
        "final_norm",
    ]
    inputs = tx.encoder_decoder(V, D, 1, N).input
    assert sorted(inputs) == ["source", "target"]
    packed = tx.encoder(V, D, 1, N, packed=True, num_segments=2, token_types=True)
    assert sorted(packed.input) == [
        "positions",
        "segment_ids",
        "token_types",
        "tokens",
    ]


def test_a_position_layer_is_a_template_that_many_models_may_copy():
    rotary = tx.RotaryPosition(500)
    relative = tx.RelativePosition(N, num_buckets=8, max_distance=16)
    first = tx.decoder(V, D, 2, N, position=rotary)
    second = tx.decoder(V, D, 1, N, position=rotary)
    held = [
        model.get_layer(f"block_{index}").attention.position
        for model, index in ((first, 0), (first, 1), (second, 0))
    ]
    assert {p.max_wavelength for p in held} == {500.0}
    assert len({id(p) for p in (*held, rotary)}) == 4
    model = tx.encoder_decoder(V, D, 1, N, position=relative)
    assert "encoder_position/embeddings" in paths(model)
    assert not relative.built


def test_a_position_goes_into_blocks_of_ones_own_that_have_none():
    own = tx.RotaryPosition(500)
    model = tx.decoder(
        V,
        D,
        2,
        block=lambda index: tx.TransformerBlock(
            tx.MultiHead(N, position=own if index == 0 else None), 28
        ),
        position=tx.RotaryPosition(700),
    )
    wavelengths = [
        model.get_layer(f"block_{index}").attention.position.max_wavelength
        for index in range(2)
    ]
    assert wavelengths == [500.0, 700.0]


def test_padding_counts_in_no_pooled_vector_and_nothing_but_padding_stays_finite():
    model = moved(tx.encoder(V, D, 1, N, output="classes", num_classes=3, pad_id=0))
    row = tokens(1, 4)
    padded = np.pad(row, ((0, 0), (0, 3)))
    np.testing.assert_allclose(
        array(model(padded)), array(model(row)), rtol=1e-5, atol=1e-5
    )
    assert np.isfinite(array(model(np.zeros((1, 4), "int32")))).all()


def test_the_dtype_argument_reaches_every_layer():
    for build in (tx.decoder, tx.encoder, tx.encoder_decoder):
        model = build(V, D, 1, N, position="relative", dtype="mixed_bfloat16")
        computed = {
            layer.compute_dtype
            for layer in model._flatten_layers(include_self=False)
            if layer.weights
        }
        assert computed == {"bfloat16"}


WRONG = {
    "no layers": lambda: tx.decoder(V, D, 0, N),
    "no layers of an encoder": lambda: tx.encoder(V, D, 0, N),
    "no layers of a decoder": lambda: tx.encoder_decoder(V, D, 0, N),
    "no encoder layers": lambda: tx.encoder_decoder(V, D, 1, N, num_encoder_layers=0),
    "half a layer": lambda: tx.decoder(V, D, 1.5, N),
    "a flag for a number": lambda: tx.decoder(V, D, True, N),
    "no heads": lambda: tx.decoder(V, D, 1),
    "heads that do not divide": lambda: tx.decoder(V, D, 1, 5),
    "key heads that do not divide": lambda: tx.decoder(V, D, 1, N, num_kv_heads=3),
    "a block and heads": lambda: tx.decoder(
        V, D, 1, N, block=lambda index: tx.TransformerBlock(N, 28)
    ),
    "a block and its options": lambda: tx.decoder(
        V, D, 1, hidden_dim=9, block=lambda index: tx.TransformerBlock(N, 28)
    ),
    "a block that is a layer": lambda: tx.decoder(
        V, D, 1, block=tx.TransformerBlock(N, 28)
    ),
    "a block that returns a number": lambda: tx.decoder(
        V, D, 1, block=lambda index: index
    ),
    "a decoder's block without cross-attention": lambda: tx.encoder_decoder(
        V,
        D,
        1,
        encoder_block=lambda index: tx.TransformerBlock(N, 28),
        decoder_block=lambda index: tx.TransformerBlock(N, 28),
    ),
    "cross-attention without a source": lambda: tx.decoder(
        V, D, 1, block=lambda index: tx.TransformerBlock(N, 28, cross_attention=N)
    ),
    "half the blocks": lambda: tx.encoder_decoder(
        V, D, 1, encoder_block=lambda index: tx.TransformerBlock(N, 28)
    ),
    "an unknown position": lambda: tx.decoder(V, D, 1, N, position="absolute"),
    "learned without a length": lambda: tx.decoder(V, D, 1, N, position="learned"),
    "a length without a use": lambda: tx.decoder(V, D, 1, N, max_length=9),
    "relative without heads": lambda: tx.decoder(
        V,
        D,
        1,
        position="relative",
        block=lambda index: tx.TransformerBlock(N, 28),
    ),
    "padding out of range": lambda: tx.decoder(V, D, 1, N, pad_id=V),
    "a negative cap": lambda: tx.decoder(V, D, 1, N, logit_cap=-1),
    "dropout of everything": lambda: tx.decoder(V, D, 1, N, dropout=1.0),
    "no spread": lambda: tx.decoder(V, D, 1, N, init_stddev=0),
    "an unknown norm": lambda: tx.decoder(V, D, 1, N, norm="batch"),
    "an unknown output": lambda: tx.encoder(V, D, 1, N, output="logits"),
    "classes without a number": lambda: tx.encoder(V, D, 1, N, output="classes"),
    "a number of classes too many": lambda: tx.encoder(V, D, 1, N, num_classes=3),
    "types without a number": lambda: tx.encoder(V, D, 1, N, token_types=True),
    "a transform of features": lambda: tx.encoder(V, D, 1, N, transform="gelu"),
    "a pooler of tokens": lambda: tx.encoder(
        V, D, 1, N, output="tokens", pooler="tanh"
    ),
    "packed classes": lambda: tx.encoder(
        V, D, 1, N, output="classes", num_classes=3, packed=True
    ),
    "two vocabularies in one table": lambda: tx.encoder_decoder(
        V, D, 1, N, target_vocab_size=37, share_embeddings=True
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_options_that_make_no_sense_are_refused(kind):
    with pytest.raises(ValueError) as error:
        WRONG[kind]()
    # It is our own message, for it says or names what arrived.
    assert re.search("[Rr]eceived|`", str(error.value))


def test_builders_have_the_same_defaults_where_they_have_the_same_options():
    def defaults(build):
        return {
            name: parameter.default
            for name, parameter in inspect.signature(build).parameters.items()
            if name != "name"
        }

    ours = defaults(tx.decoder)
    for build in (tx.encoder, tx.encoder_decoder):
        for name, default in defaults(build).items():
            assert ours.get(name, default) == default, name
