"""Writes the golden files of this version: models that must load for ever.

    python tests/make_golden.py

makes `tests/golden/MAJOR.MINOR/` and refuses to touch one that is there. Later
versions of keras_tx read all of them (`test_golden.py`); a new version adds a
folder when it adds layers, options or formats. For each case there are

- `CASE.keras`, the whole model, and `CASE.weights.h5.gz`, its weights alone;
- `CASE.npz`, inputs and the outputs that belong to them;
- an entry in `expected.json`: paths, digests of the weights, dtypes.

Models are tiny and their files compressed, for they stay in the repository.
"""

import gzip
import hashlib
import json
import pathlib
import sys
import zipfile

import keras
import numpy as np
from hard_models import HARD_MODELS

import keras_tx as tx
from keras_tx import serialization

FOLDER = pathlib.Path(__file__).parent / "golden"

# Batch, queries, keys, features, heads, context's features, hidden features,
# tokens.
B, T, S, D, N, C, F, V = 2, 5, 6, 8, 2, 3, 12, 13


def attention():
    """Every way to attend, on one input."""
    x = keras.Input((None, D), name="x")
    context = keras.Input((None, C), name="context")
    raw = tx.ScaledAttention(causal=True, window=2, soft_cap=3.0, name="raw")
    plain = tx.MultiHead(N, name="plain")
    rotary = tx.MultiHead(
        N,
        6,
        num_kv_heads=1,
        causal=True,
        attention=tx.ScaledAttention(0.4, window=3, soft_cap=5.0),
        position=tx.RotaryPosition(
            500,
            rotary_dim=4,
            layout="interleaved",
            scaling=tx.YarnScaling(4.0, original_max_length=16),
        ),
        query_key_norm="rms",
        use_bias=False,
        name="rotary",
    )
    cross = tx.MultiHead(
        N,
        position=tx.RelativePosition(N, num_buckets=4, max_distance=5),
        query_key_norm=keras.layers.LayerNormalization(epsilon=1e-3),
        use_bias="qkv",
        name="cross",
    )
    alibi = tx.MultiHead(N, position=tx.AlibiPosition(N), name="alibi")
    return keras.Model(
        {"x": x, "context": context},
        {
            "raw": raw(x),
            "plain": plain(x, return_attention_scores=True)[1],
            "rotary": rotary(x),
            "cross": cross(x, context),
            "alibi": alibi(x, use_causal_mask=True),
        },
    )


def positions():
    """Every position, on embeddings, heads and scores."""
    x = keras.Input((None, D), name="x")
    heads = keras.Input((None, N, D), name="heads")
    scalings = {
        "plain": None,
        "linear": tx.LinearScaling(2.0),
        "ntk": tx.NtkScaling(2.0),
        "yarn": tx.YarnScaling(4.0, 16, beta_fast=8.0, magnitude=1.5, truncate=False),
        "llama3": tx.Llama3Scaling(8.0, original_max_length=16),
    }
    outputs = {
        "interleaved": tx.SinusoidalPosition(name="interleaved")(x),
        "half": tx.SinusoidalPosition(500, layout="half", name="half")(x),
        "learned": tx.LearnedPosition(7, name="learned")(x),
        "relative": tx.RelativePosition(
            N, num_buckets=8, max_distance=12, bidirectional=False, name="relative"
        )(x),
        "alibi": tx.AlibiPosition(3, name="alibi")(x),
    }
    for name, scaling in scalings.items():
        outputs[name] = tx.RotaryPosition(scaling=scaling, name=name)(heads)
    return keras.Model({"x": x, "heads": heads}, outputs)


def within_tokens():
    """Feed-forward layers, norm, segments, embeddings and their way back."""
    x = keras.Input((None, D), name="x")
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    types = keras.Input((None,), dtype="int32", name="types")
    tied = tx.TokenEmbedding(V, D, pad_id=3, use_bias=True, soft_cap=2.0, name="tied")
    free = tx.TokenEmbedding(V, D, tie_weights=False, name="free")
    return keras.Model(
        {"x": x, "tokens": tokens, "types": types},
        {
            "plain": tx.FeedForward(F, name="plain")(x),
            "gated": tx.FeedForward(
                F, "gelu_tanh", gated=True, use_bias=False, dropout=0.1, name="gated"
            )(x),
            "rms": tx.RMSNorm(epsilon=1e-4, name="rms")(x),
            "segment": tx.LearnedSegment(2, name="segment")(x, token_types=types),
            "tied": tied(tied(tokens), reverse=True),
            "free": free(free(tokens), reverse=True),
        },
    )


def blocks():
    """Blocks with each place of the norm and each residual."""
    x = keras.Input((None, D), name="x")
    context = keras.Input((None, C), name="context")
    rms = keras.layers.RMSNormalization(epsilon=1e-6)
    made = {
        "pre": tx.TransformerBlock(N, F, name="pre"),
        "post": tx.TransformerBlock(
            tx.MultiHead(N, position=tx.RotaryPosition()),
            tx.FeedForward(F, "silu", gated=True),
            causal=True,
            norm=rms,
            norm_position="post",
            dropout=0.1,
            seed=1,
            name="post",
        ),
        "sandwich": tx.TransformerBlock(
            N, F, norm="rms", norm_position="sandwich", name="sandwich"
        ),
        "parallel": tx.TransformerBlock(N, F, residual="parallel", name="parallel"),
        "bare": tx.TransformerBlock(
            N, keras.layers.Dense(D), norm=None, residual="none", name="bare"
        ),
        "sequential": tx.TransformerBlock(
            N,
            keras.Sequential(
                [  # named, for Keras' own names count all layers made before
                    keras.layers.Dense(F, "relu", name="dense_1"),
                    keras.layers.Dense(D, name="dense_2"),
                ]
            ),
            name="sequential",
        ),
    }
    outputs = {name: block(x) for name, block in made.items()}
    cross = tx.TransformerBlock(N, F, cross_attention=4, causal=True, name="cross")
    outputs["cross"] = cross(x, context=context)
    return keras.Model({"x": x, "context": context}, outputs)


def trained_decoder():
    """A compiled decoder that has made one step, with its optimizer's state."""
    model = tx.decoder(V, D, 2, N, pad_id=0)
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    model.train_on_batch(inputs_of(model)["tokens"], inputs_of(model)["tokens"])
    return model


def plain_decoder():
    return tx.decoder(
        V,
        D,
        1,
        N,
        hidden_dim=F,
        activation="gelu_tanh",
        gated=False,
        use_bias=True,
        norm="layer",
        position="learned",
        max_length=7,
        embedding_scale="sqrt",
        embedding_norm="layer",
        tie_embeddings=False,
        output_bias=True,
        logit_cap=4.0,
        dropout=0.1,
    )


def packed_decoder():
    return tx.decoder(
        V,
        D,
        1,
        N,
        hidden_dim=F,
        num_kv_heads=1,
        window=3,
        norm_position="sandwich",
        position="alibi",
        packed=True,
    )


def sinusoidal_decoder():
    return tx.decoder(
        V, D, 1, N, hidden_dim=F, norm_position="post", position="sinusoidal"
    )


def half_decoder():
    return tx.decoder(V, D, 1, N, hidden_dim=F, dtype="mixed_bfloat16")


def chunked_decoder():
    """Compiled with a loss of ours, and computed again for the gradient."""
    model = tx.decoder(V, D, 1, N, hidden_dim=F, remat=True)
    loss = tx.ChunkedCrossentropy(ignore_class=-1, chunk_size=4)
    model.compile(keras.optimizers.SGD(0.1), loss)
    return model


def pooled_encoder():
    return tx.encoder(
        V, D, 1, N, hidden_dim=F, pooler="tanh", pooling="first", position=None
    )


def token_encoder():
    return tx.encoder(
        V,
        D,
        1,
        N,
        hidden_dim=F,
        output="tokens",
        transform="gelu_tanh",
        output_bias=True,
        position="relative",
    )


def classifier():
    return tx.encoder(
        V,
        D,
        1,
        N,
        hidden_dim=F,
        output="classes",
        num_classes=3,
        num_segments=2,
        token_types=True,
        pad_id=0,
        dropout=0.1,
    )


def encoder_decoder():
    return tx.encoder_decoder(
        V, D, 1, N, hidden_dim=F, num_encoder_layers=2, pad_id=0, output_scale=0.5
    )


def translator():
    return tx.encoder_decoder(
        V,
        D,
        1,
        N,
        hidden_dim=F,
        target_vocab_size=11,
        position="relative",
        tie_embeddings=False,
        pad_id=0,
        mask_target=False,
    )


CASES = {
    make.__name__: make
    for make in (
        attention,
        positions,
        within_tokens,
        blocks,
        trained_decoder,
        plain_decoder,
        packed_decoder,
        sinusoidal_decoder,
        half_decoder,
        chunked_decoder,
        pooled_encoder,
        token_encoder,
        classifier,
        encoder_decoder,
        translator,
    )
} | HARD_MODELS


def inputs_of(model):
    """Numbers for every input, the same for the same names and shapes."""
    found = {}
    for index, symbol in enumerate(model.inputs):
        length = S if symbol.name in ("context", "source") else T
        shape = (B, length, *symbol.shape[2:])
        rng = np.random.default_rng(index)
        if symbol.name == "positions":
            found[symbol.name] = np.tile(np.arange(T, dtype="int32"), (B, 1))
        elif symbol.name in ("segment_ids", "types", "token_types"):
            found[symbol.name] = np.sort(rng.integers(0, 2, shape)).astype("int32")
        elif "int" in symbol.dtype:
            tokens = rng.integers(1, 11, shape).astype("int32")
            tokens[-1, -1] = 0  # padding, where there is any
            found[symbol.name] = tokens
        else:
            found[symbol.name] = rng.normal(size=shape).astype("float32")
    return found


def call(model, inputs):
    """Returns `{name: output}` as NumPy arrays of at least float32."""
    outputs = model(inputs if len(inputs) > 1 else next(iter(inputs.values())))
    if not isinstance(outputs, dict):
        outputs = {"output": outputs}
    return {
        name: keras.ops.convert_to_numpy(keras.ops.cast(x, "float32"))
        for name, x in outputs.items()
    }


def digests(model):
    return [
        hashlib.sha256(np.ascontiguousarray(w).tobytes()).hexdigest()[:16]
        for w in model.get_weights()
    ]


def losses_of_two_steps(model, inputs):
    """What a compiled model says of its next two steps."""
    x = inputs["tokens"]
    losses = []
    for _ in range(2):
        losses.append(float(model.train_on_batch(x, x)))
        model.reset_metrics()
    return losses


def main():
    version = ".".join(tx.__version__.split(".")[:2])
    folder = FOLDER / version
    if folder.exists():
        sys.exit(
            f"{folder} is there already. Golden files are never written anew: "
            "raise the version in keras_tx/_version.py to add some."
        )
    folder.mkdir(parents=True)
    expected = {}
    for name, make in CASES.items():
        keras.utils.set_random_seed(len(name))
        model = make()
        rng = np.random.default_rng(len(name))
        if not model.compiled:  # zeros and ones must not stand for each other
            for v in model.weights:
                v.assign(v.numpy() + rng.normal(0, 0.2, v.shape).astype("float32"))
        inputs = inputs_of(model)
        outputs = call(model, inputs)
        expected[name] = {
            "paths": [v.path for v in model.weights],
            "weights": digests(model),
            "policies": sorted({layer.dtype_policy.name for layer in model.layers}),
        }
        model.save(folder / "model.keras")
        squeeze(folder / "model.keras", folder / f"{name}.keras")
        model.save_weights(folder / "model.weights.h5")
        raw = (folder / "model.weights.h5").read_bytes()
        packed = gzip.compress(raw, mtime=0)
        (folder / f"{name}.weights.h5.gz").write_bytes(packed)
        for written in ("model.keras", "model.weights.h5"):
            (folder / written).unlink()
        np.savez_compressed(
            folder / f"{name}.npz",
            **{f"inputs/{key}": x for key, x in inputs.items()},
            **{f"outputs/{key}": x for key, x in outputs.items()},
        )
        if model.compiled:
            expected[name]["losses"] = losses_of_two_steps(model, inputs)
    about = {
        "format": serialization.FORMAT,
        "keras_tx": tx.__version__,
        "keras": keras.__version__,
        "backend": keras.backend.backend(),
        "cases": expected,
    }
    (folder / "expected.json").write_text(json.dumps(about, indent=1) + "\n")
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {len(expected)} cases, {size:,} bytes")


def squeeze(source, target):
    """Compresses a `.keras` file, which Keras stores plain and reads either way."""
    with (
        zipfile.ZipFile(source) as read,
        zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as write,
    ):
        for name in read.namelist():
            about = zipfile.ZipInfo(name)  # dated 1980: the same bytes every time
            write.writestr(about, read.read(name), zipfile.ZIP_DEFLATED, 9)


if __name__ == "__main__":
    main()
