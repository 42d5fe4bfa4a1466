"""Llama-family files in the GGUF format, their quantized weights made plain.

One file holds settings, weights and tokenizer. It becomes what a folder is: a
config in the published spelling and tensors under the published names, which the
family `llama` then reads like any other.
"""

import re

import numpy as np

from keras_tx.pretrained.checkpoint import require
from keras_tx.pretrained.deferred import aligned_empty

EXTRA = '"keras-tx[gguf]"'

# How many rows are made plain at a time.
ROWS = 2048

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SETTINGS = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}


class GgufFile:
    """A checkpoint in one file, as `Folder` is one in a folder.

    Args:
        path: The file.

    Raises:
        ValueError: If it is damaged, or of another architecture.
    """

    def __init__(self, path):
        self.path = path
        reader = read_gguf(path)
        self._tensors = {plain_name(t.name): t for t in reader.tensors}
        self.config = self._read_config(reader)

    def _read_config(self, reader):
        fields = {
            name: field.contents()
            for name, field in reader.fields.items()
            if not name.startswith("tokenizer.ggml.")
        }
        architecture = fields.get("general.architecture")
        if architecture != "llama":
            raise ValueError(
                f"'{self.path}' has the architecture {architecture!r}. GGUF files "
                "are read of the architecture 'llama', which SmolLM2 and Mistral "
                "have too; others from the safetensors of their folder."
            )
        config = {
            "model_type": "llama",
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self._tensors,
            "vocab_size": self.shape("model.embed_tokens.weight")[0],
        }
        for name, value in fields.items():
            if name.startswith("llama."):
                name = name.removeprefix("llama.")
                # What is not known here is refused where it may matter.
                config[SETTINGS.get(name, name.replace(".", "_"))] = value
        heads = config.get("num_attention_heads")
        if isinstance(heads, int) and heads > 0:
            size = config.get("hidden_size", 0) // heads
            config.setdefault("head_dim", size)
        for name in ("rope_dimension_count", "attention_value_length"):
            if config.pop(name, config.get("head_dim")) != config.get("head_dim"):
                raise ValueError(
                    f"'{self.path}' has another {name} than heads have features, "
                    "which keras_tx does not read."
                )
        return config

    @property
    def names(self):
        """Names of the tensors, as they are published in folders."""
        return list(self._tensors)

    def shape(self, name):
        """Returns the shape of a tensor."""
        if name not in self._tensors:
            raise ValueError(f"'{self.path}' has no tensor for '{name}'.")
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def check_dtype(self, name):
        """Refuses a tensor whose quantization is not known."""
        quants = require("gguf.quants", EXTRA)
        tensor = self._tensors[name]
        try:
            quants.dequantize(tensor.data[:1], tensor.tensor_type)
        except NotImplementedError as error:
            raise ValueError(f"The tensor '{name}': {error}.") from error

    def read(self, name, dtype):
        """Returns a tensor as a NumPy array of its own, in a dtype.

        Read piece by piece rather than from the reader's map of the file, whose
        pages count as memory in use until the whole file is done with.
        """
        quants = require("gguf.quants", EXTRA)
        tensor = self._tensors[name]
        array = aligned_empty(self.shape(name), dtype)
        stored, row = tensor.data.dtype, tensor.data.shape[1:]
        with open(self.path, "rb") as handle:
            handle.seek(tensor.data_offset)
            for start in range(0, len(array), ROWS):
                rows = np.empty((min(ROWS, len(array) - start), *row), stored)
                handle.readinto(rows.reshape(-1).view(np.uint8))
                array[start : start + len(rows)] = quants.dequantize(
                    rows, tensor.tensor_type
                )
        heads = {
            "q_proj": self.config.get("num_attention_heads"),
            "k_proj": self.config.get("num_key_value_heads")
            or self.config.get("num_attention_heads"),
        }
        kind = name.split(".")[-2]
        return array if kind not in heads else unpair(array, heads[kind])


def unpair(array, num_heads):
    """Returns rows of queries or keys in the order of published folders.

    GGUF has features (2 i, 2 i + 1) of a head rotate together, the folders
    (i, i + H / 2).
    """
    pairs = array.reshape(num_heads, -1, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def plain_name(name):
    """Returns the published name of a tensor."""
    layer, rest = re.fullmatch(r"(?:blk\.(\d+)\.)?(.*)", name).groups()
    stem, _, kind = rest.rpartition(".")
    stem = NAMES.get(stem, stem)
    return f"{stem}.{kind}" if layer is None else f"model.layers.{layer}.{stem}.{kind}"


def read_gguf(path):
    """Returns the `gguf.GGUFReader` of a file."""
    gguf = require("gguf", EXTRA)
    try:
        return gguf.GGUFReader(path)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ValueError(f"'{path}' is not a sound GGUF file: {error}.") from error


# ----------------------------------------------------------------------------
# The tokenizer inside
# ----------------------------------------------------------------------------

# Kinds of tokens that stand for themselves in a text.
CONTROL, USER_DEFINED = 3, 4


def load_tokenizer(path):
    """Returns the tokenizer of a GGUF file, put together by `tokenizers`."""
    tokenizers = require("tokenizers")
    fields = read_gguf(path).fields

    def read(name):
        field = fields.get(f"tokenizer.ggml.{name}")
        return None if field is None else field.contents()

    model, before = read("model"), read("pre")
    if model != "gpt2" or before not in ("gpt-2", "smollm"):
        raise ValueError(
            f"The tokenizer of '{path}' is a {model!r} that splits like {before!r}. "
            "Read are byte-level BPE that split like 'gpt-2' or 'smollm'; take the "
            "`tokenizer.json` of the model's folder instead."
        )
    tokens = read("tokens")
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(pair.split(" ")) for pair in read("merges")],
        )
    )
    split = tokenizers.pre_tokenizers
    by_bytes = split.ByteLevel(add_prefix_space=False)
    digits = [split.Digits(individual_digits=True)] if before == "smollm" else []
    tokenizer.pre_tokenizer = split.Sequence([*digits, by_bytes])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    kinds = zip(tokens, read("token_type"), strict=True)
    tokenizer.add_special_tokens(
        [token for token, kind in kinds if kind in (CONTROL, USER_DEFINED)]
    )
    return tokenizer
