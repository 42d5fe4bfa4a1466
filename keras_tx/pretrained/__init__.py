"""Published checkpoints in and out: names and sizes, no layers of their own."""

import os
import pathlib

import keras

from keras_tx.pretrained import (
    bert,
    distilbert,
    gemma2,
    gpt2,
    llama,
    mistral,
    qwen2,
    qwen3,
    roberta,
    t5,
)
from keras_tx.pretrained.checkpoint import Folder, require, write_folder
from keras_tx.pretrained.compare import differences
from keras_tx.pretrained.config import HARMLESS, Config
from keras_tx.pretrained.deferred import build_without_values, fill
from keras_tx.pretrained.gguf import GgufFile
from keras_tx.pretrained.gguf import load_tokenizer as load_gguf_tokenizer
from keras_tx.pretrained.table import Options, Tensors, match, unmatch

FAMILIES = {
    module.FAMILY.name: module.FAMILY
    for module in (
        bert,
        distilbert,
        roberta,
        gpt2,
        llama,
        mistral,
        qwen2,
        qwen3,
        gemma2,
        t5,
    )
}


# Fields that `save_pretrained` writes from the model alone.
SETTLED = frozenset(
    ("architectures", "dtype", "model_type", "pad_token_id", "torch_dtype")
)


def load_pretrained(
    path,
    *,
    output=None,
    pooler=False,
    token_types=False,
    packed=False,
    pad_id="auto",
    dtype=None,
    strict=False,
):
    """Loads a published checkpoint as an ordinary model of these layers.

    Reads a folder as the Hugging Face hub has them, `config.json` beside
    safetensors in one file or several, of the families BERT, DistilBERT,
    RoBERTa, GPT-2, Llama (and SmolLM2), Mistral, Qwen2, Qwen3, Gemma 2 and T5.
    The model is what `keras_tx.encoder`, `decoder` or `encoder_decoder` makes,
    so that it trains, saves and composes like any other.

    Every tensor of the file is used exactly once and every weight is filled,
    or it is an error; so is a setting that changes the arithmetic and is not
    known here. Nothing is ever unpickled. Sizes are checked before memory is
    taken, and weights go straight from the file into the model.

    Decoders give the logits of each next token, encoders what `output` says,
    T5 takes `source` and `target`. Encoders and T5's source mask the config's
    padding token. Decoders mask none unless `pad_id` says so, as published
    logits count every token; neither does T5's target, which starts with the
    padding token. RoBERTa's padding must be on the right.

    A `.gguf` file of the architecture `llama` is read too, with the package
    `gguf`; its quantized weights become plain ones.

    Args:
        path: The folder, or the `.gguf` file.
        output: What an encoder gives: `"features"`, `"tokens"`, logits that
            fill in the blank, or `"classes"`, the logits of a classifier.
            Default: what the checkpoint was saved as.
        pooler: Whether features come with the pooled first token, as a dict of
            `features` and `pooled`. BERT and RoBERTa.
        token_types: Whether the model also takes `token_types`. BERT and
            RoBERTa; otherwise every token is of type 0.
        packed: Whether the model also takes `positions` and `segment_ids`.
        pad_id: The token that is masked as padding, `None` for no masking, or
            `"auto"`, as said above.
        dtype: Dtype policy of the layers, for example `"bfloat16"`. Default:
            the global one. It need not be the file's.
        strict: Whether to refuse a config with any unknown field, even one
            that seems harmless.

    Returns:
        A `keras.Model`, named like its family.

    Raises:
        ValueError: If the folder is no sound checkpoint of a known family, and
            for options that its model has no use for.

    Example:

    >>> keras_tx.save_pretrained(keras_tx.decoder(96, 32, 2, 4), "folder")
    >>> model = keras_tx.load_pretrained("folder")
    >>> model(keras.ops.ones((1, 10), dtype="int32")).shape
    (1, 10, 96)
    """
    source = _open(path)
    family = _family(source.config.get("model_type"))
    output = _output(family, source.config, output)
    options = Options(
        output=output,
        pooler=pooler,
        token_types=token_types,
        packed=packed,
        pad_id=pad_id,
        dtype=dtype,
    )
    options.check(family)
    family = family.settled(source.config, output)
    tensors = Tensors(family, source)
    config = Config(source.config, tensors)
    model, pending = build_without_values(lambda: family.build(config, options))
    config.finish(strict)
    readers = match(family, tensors, model, "pooled" if pooler else output)
    fill(pending, readers)
    return model


def save_pretrained(model, path, *, family=None, config=None):
    """Writes a model as a folder that Hugging Face `transformers` loads.

    The model, built by `keras_tx.encoder`, `decoder` or `encoder_decoder` or by
    `load_pretrained` and then trained, must compute what one of the families
    of `load_pretrained` computes; `transformers` then gives the same numbers.
    A tokenizer is not written: put its `tokenizer.json` beside.

    Args:
        model: The model.
        path: The folder. Files of an older checkpoint there are replaced once
            all is written; on failure nothing is.
        family: Name of the family, for example `"llama"`. Default: that of
            the model's name, then any that can express it.
        config: Optional dict of further fields that change no arithmetic, such
            as `{"eos_token_id": 2}`.

    Raises:
        ValueError: If no family can express the model; it says what stands in
            the way.

    Example:

    >>> model = keras_tx.decoder(96, 32, 2, 4)
    >>> keras_tx.save_pretrained(model, "folder", config={"eos_token_id": 2})
    """
    if not _is_functional(model):
        raise ValueError(
            "`save_pretrained` writes models of `keras_tx.encoder`, `decoder` and "
            f"`encoder_decoder`. Received: {model!r}."
        )
    extra = dict(config or {})
    unknown = sorted(set(extra) - (HARMLESS - SETTLED))
    if unknown:
        raise ValueError(
            f"`config` adds fields that change no arithmetic. Received: {unknown}."
        )
    family, fields, options = _express(model, family)
    architecture = next(
        name
        for name, output in family.architectures.items()
        if output == options.output
    )
    prefix = "" if options.output == "features" else family.prefix
    dtype = keras.backend.standardize_dtype(model.weights[0].dtype)
    write_folder(
        path,
        {
            "model_type": family.name,
            "architectures": [architecture],
            "torch_dtype": dtype,
            "bos_token_id": None,
            "eos_token_id": None,
            **fields,
            **extra,
        },
        unmatch(family.settled(fields, options.output), model, prefix),
    )


def load_tokenizer(path):
    """Loads the tokenizer of a checkpoint, a `tokenizers.Tokenizer`.

    Its `encode_batch` gives objects whose `ids` go into the model. Some files
    cut and pad texts to a fixed length; `no_truncation()`, `no_padding()` and
    `enable_padding()` change that.

    Args:
        path: The folder, with `tokenizer.json`, or a `.gguf` file.

    Returns:
        A `tokenizers.Tokenizer`.

    Raises:
        ValueError: If there is no `tokenizer.json`, or the file's tokenizer is
            of a kind that is not known here.

    Example:

    >>> import os, tokenizers
    >>> os.makedirs("folder")
    >>> words = tokenizers.models.WordLevel({"[UNK]": 0, "cat": 1}, "[UNK]")
    >>> tokenizers.Tokenizer(words).save("folder/tokenizer.json")
    >>> keras_tx.load_tokenizer("folder").encode("cat").ids
    [1]
    """
    if _is_gguf(path):
        return load_gguf_tokenizer(path)
    tokenizers = require("tokenizers")
    file = pathlib.Path(path) / "tokenizer.json"
    if not file.is_file():
        raise ValueError(
            f"There is no '{file}'. Older folders have only a vocabulary; "
            "`transformers.AutoTokenizer.from_pretrained(folder)` reads it, and "
            "its `save_pretrained(folder)` writes the file."
        )
    return tokenizers.Tokenizer.from_file(os.fspath(file))


def _open(path):
    """Returns the checkpoint at a path, a folder or a file."""
    return GgufFile(path) if _is_gguf(path) else Folder(path)


def _is_gguf(path):
    return pathlib.Path(path).suffix == ".gguf"


def _family(name):
    if name not in FAMILIES:
        raise ValueError(
            f"The config has the model_type {name!r}. keras_tx knows "
            f"{', '.join(FAMILIES)}."
        )
    return FAMILIES[name]


def _output(family, fields, output):
    """Returns what the model gives, from what was asked and what was saved."""
    outputs = list(dict.fromkeys(family.architectures.values()))
    if output is not None:
        if outputs == [None] or output not in outputs:
            raise ValueError(
                f"A model of the family {family.name} gives "
                + (
                    "logits of tokens and takes no `output`"
                    if outputs == [None]
                    else f"one of {outputs}"
                )
                + f". Received: output={output!r}."
            )
        return output
    saved = (fields.get("architectures") or list(family.architectures))[0]
    if saved not in family.architectures:
        raise ValueError(
            f"The checkpoint was saved as a {saved!r}. Of the family {family.name}, "
            f"keras_tx knows {', '.join(family.architectures)}."
            + (
                " If that part of it is what you want, say so with `output`, one of "
                f"{outputs}."
                if outputs != [None]
                else ""
            )
        )
    return family.architectures[saved]


def _is_functional(model):
    """Whether a model is a graph of layers whose config tells it all."""
    if not isinstance(model, keras.Model) or not model.built:
        return False
    try:
        return "output_layers" in model.get_config()
    except NotImplementedError:
        return False


def _express(model, name):
    """Returns family, config fields and options that make the same model.

    Each family describes the model by a config as well as it can, and builds
    what that config says. If this computes the same, the config is right; if
    not, the difference is what stands in the way.
    """
    candidates = [_family(name)] if name is not None else list(FAMILIES.values())
    if name is None and model.name in FAMILIES:
        candidates.sort(key=lambda family: family.name != model.name)
    obstacles = {}
    for family in candidates:
        found = _try(family, model)
        if not isinstance(found, list):
            return family, *found
        obstacles[family.name] = found
    nearest = min(obstacles, key=lambda name: len(obstacles[name]))
    shown = obstacles[nearest]
    raise ValueError(
        f"No published family computes what '{model.name}' does. Nearest is "
        f"{nearest}, but for this: {'; '.join(shown[:6])}"
        + (f"; and {len(shown) - 6} more" if len(shown) > 6 else "")
        + ". Save it with `model.save`, or build it with other options."
    )


def _try(family, model):
    """Returns `(fields, options)`, or a list of what stands in the way."""
    inputs = {tensor.name for tensor in model.inputs}
    embedding = next((x for x in model.layers if x.name.endswith("embedding")), None)
    output = _output_of(model, family)
    options = Options(
        output=output,
        pooler=isinstance(model.output, dict),
        token_types="token_types" in inputs,
        packed="segment_ids" in inputs,
        pad_id=getattr(embedding, "pad_id", None),
    )
    try:
        options.check(family)
        fields = {**family.describe(model), "model_type": family.name}
        other, _ = build_without_values(lambda: family.build(Config(fields), options))
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        return [f"{error}"] * 100  # as far away as can be
    return differences(model, other) or (fields, options)


def _output_of(model, family):
    """Returns which output of a family a model has."""
    if set(family.architectures.values()) == {None}:
        return None
    names = {layer.name for layer in model.layers}
    if "classes" in names:
        return "classes"
    return "tokens" if "transform" in names else "features"
