"""Reading config.json: every field is used, known to be harmless, or reported."""

import warnings

from keras_tx.positions import (
    LinearScaling,
    Llama3Scaling,
    NtkScaling,
    RotaryPosition,
    YarnScaling,
)

REQUIRED = object()

# Fields that say nothing about the numbers of a forward pass.
# fmt: off
HARMLESS = frozenset((
    "_attn_implementation_autoset", "_name_or_path", "_num_labels", "architectures",
    "attn_implementation", "bos_token_id", "cache_implementation",
    "chunk_size_feed_forward", "decoder_start_token_id", "directionality", "dtype",
    "eos_token_id", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id",
    "gradient_checkpointing", "id2label", "initializer_factor", "initializer_range",
    "is_llama_config", "label2id", "language", "max_length", "min_length",
    "model_type", "num_beams", "num_labels", "output_attentions",
    "output_hidden_states", "output_past", "output_scores", "pad_token_id",
    "prefix", "pretraining_tp", "problem_type", "return_dict",
    "return_dict_in_generate", "sep_token_id", "suppress_tokens",
    "task_specific_params", "tokenizer_class", "top_k", "top_p", "torch_dtype",
    "torchscript", "transformers.js_config", "transformers_version",
    "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache",
))
# fmt: on

# Parts of names of fields that change what a model computes. A field that
# nobody here knows is refused if it has one, and only reported otherwise.
# fmt: off
ARITHMETIC = (
    "act", "adapter", "alibi", "attention", "attn", "auto_map", "bias", "cap",
    "channel", "clip", "conv", "decoder", "depth", "dim", "embed", "encoder",
    "epsilon", "expert", "factor", "gate", "head", "hidden", "inner", "inter",
    "layer", "mlp", "moe", "multiplier", "norm", "offset", "parallel", "pattern",
    "pool", "position", "prune", "quant", "query", "rank", "residual", "rope",
    "rotary", "router", "scale", "scaling", "segment", "share", "size", "skip",
    "slope", "sparse", "theta", "tie", "tied", "type", "upcast", "vocab", "window",
)
# fmt: on


def changes_arithmetic(name):
    """Whether the name of a field says that it may change the numbers."""
    words = name.lower().split("_")
    return any(
        part in words or (len(part) > 3 and part in name.lower()) for part in ARITHMETIC
    )


class Config:
    """The fields of a `config.json`, and which of them were understood.

    Args:
        fields: The dict.
        tensors: What the file holds, a `Tensors`, or `None` where a config
            stands for itself.
    """

    def __init__(self, fields, tensors=None):
        self.fields = fields
        self.tensors = tensors
        self._known = set(HARMLESS)

    def get(self, name, default=None):
        """Returns a field as it is, or the default where it is missing or null."""
        self._known.add(name)
        value = self.fields.get(name)
        if value is None and default is REQUIRED:
            raise ValueError(
                f"The config has no `{name}`, which its `model_type` "
                f"{self.fields.get('model_type')!r} needs."
            )
        return default if value is None else value

    def integer(self, name, default=REQUIRED):
        """Returns a positive integer."""
        value = self.get(name, default)
        if value is default:
            return value  # by identity: what is stated is checked
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(name, value, "a positive integer")
        return value

    def layers(self, name, default=REQUIRED):
        """Returns a number of layers, of which each has tensors of its own."""
        value = self.integer(name, default)
        if self.tensors is not None and value > len(self.tensors.names):
            raise ValueError(
                f"The config has `{name}` = {value}, more than the "
                f"{len(self.tensors.names)} tensors of the file."
            )
        return value

    def tied(self, duplicate, original, stated):
        """Returns whether two tensors are one, by what the file has.

        Args:
            duplicate: Name of the one that may be missing.
            original: Name of the other.
            stated: What the config says, where the file says nothing.
        """
        names = () if self.tensors is None else self.tensors.names
        if duplicate not in names:
            return stated or self.tensors is not None
        return stated and self.tensors.equal(duplicate, original)

    def number(self, name, default=REQUIRED):
        """Returns a number above 0."""
        value = self.get(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise self.wrong(name, value, "a number above 0")
        return float(value)

    def rate(self, name, default=0.0):
        """Returns a dropout rate."""
        value = self.get(name, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not 0 <= value < 1
        ):
            raise self.wrong(name, value, "a rate from 0 up to but not 1")
        return float(value)

    def flag(self, name, default):
        """Returns true or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def only(self, name, *values):
        """Refuses a field whose value changes the arithmetic unsupported.

        Args:
            name: The field; missing or null is fine.
            *values: What is supported.
        """
        value = self.get(name)
        if value is not None and not any(
            value == allowed and type(value) is type(allowed) for allowed in values
        ):
            raise self.wrong(name, value, " or ".join(map(repr, values)))

    def harmless(self, *names):
        """Notes fields of this family that change nothing here."""
        self._known.update(names)

    def activation(self, name, default=REQUIRED):
        """Returns our name of an activation."""
        return self.activation_of(name, self.get(name, default))

    def activation_of(self, name, value):
        """Returns our name of an activation that a part of a field names."""
        if value not in ACTIVATIONS:
            raise self.wrong(name, value, f"one of {sorted(ACTIVATIONS)}")
        return ACTIVATIONS[value]

    def wrong(self, name, value, expected):
        """Returns the error for a field that is not supported."""
        return ValueError(
            f"The config has `{name}` = {value!r}, which changes what the model "
            f"computes in a way that keras_tx does not know. Supported: {expected}."
        )

    def finish(self, strict):
        """Refuses unknown fields that may change the arithmetic, warns of others.

        Args:
            strict: Whether to refuse the others too.
        """
        unknown = {
            name: value
            for name, value in self.fields.items()
            if name not in self._known and value is not None
        }
        risky = {
            name: value
            for name, value in unknown.items()
            if strict or changes_arithmetic(name)
        }
        if risky:
            raise ValueError(
                f"The config has fields that keras_tx does not know: {risky}. They "
                "may change what the model computes, so it is not loaded. If you "
                "are sure that they do not, remove them from the config."
            )
        if unknown:
            warnings.warn(
                f"The config has fields that keras_tx does not know and takes for "
                f"harmless: {unknown}.",
                stacklevel=4,
            )


# ----------------------------------------------------------------------------
# Activations
# ----------------------------------------------------------------------------

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "relu6": "relu6",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "mish": "mish",
    "linear": "linear",
}


def activation_name(activation, tanh_gelu="gelu_pytorch_tanh"):
    """Returns the published name of an activation of ours.

    Args:
        activation: Our name.
        tanh_gelu: Which of the names of the tanh approximation.
    """
    names = {"gelu_tanh": tanh_gelu}
    # The first of several names is the plain one.
    for theirs, ours in ACTIVATIONS.items():
        names.setdefault(ours, theirs)
    return names.get(activation, activation)


# ----------------------------------------------------------------------------
# Rotary positions
# ----------------------------------------------------------------------------


def rotary(config, default_theta=10_000.0):
    """Returns the `RotaryPosition` of a config, in either spelling.

    `rope_parameters` holds everything; the older `rope_scaling` stands beside
    `rope_theta`, and wins where a file has both, as in the reference.
    """
    config.only("partial_rotary_factor", 1, 1.0)
    theta = config.number("rope_theta", default_theta)
    newer, older = config.get("rope_parameters"), config.get("rope_scaling")
    rules = dict(older or newer or {})
    theta = float(rules.pop("rope_theta", None) or theta)
    kind = rules.pop("rope_type", None)
    old_kind = rules.pop("type", None)
    kind = kind or old_kind or "default"
    longest = config.get("max_position_embeddings")
    original = config.get("original_max_position_embeddings")
    if kind not in SCALINGS:
        raise ValueError(
            f"The config has the rope_type {kind!r}, which keras_tx does not know. "
            f"Supported: {', '.join(SCALINGS)}."
        )
    if rules.pop("partial_rotary_factor", None) not in (None, 1):
        raise config.wrong("partial_rotary_factor", "below 1", "1")
    rules.pop("finetuned", None)  # how it came about
    rules.setdefault("original_max_position_embeddings", longest)
    if original is not None:
        rules["original_max_position_embeddings"] = original
    try:
        scaling = SCALINGS[kind](rules, longest)
    except KeyError as error:
        raise ValueError(
            f"The rope_type {kind!r} needs {error}. Received: {rules}."
        ) from error
    rules.pop("original_max_position_embeddings", None)
    rules = {name: value for name, value in rules.items() if value is not None}
    if rules:
        raise ValueError(
            f"The rope_type {kind!r} has settings that keras_tx does not know: {rules}."
        )
    return RotaryPosition(theta, scaling=scaling)


def _linear(rules, longest):
    return LinearScaling(rules.pop("factor"))


def _llama3(rules, longest):
    return Llama3Scaling(
        rules.pop("factor"),
        low_frequency_factor=rules.pop("low_freq_factor"),
        high_frequency_factor=rules.pop("high_freq_factor"),
        original_max_length=rules.pop("original_max_position_embeddings"),
    )


def _yarn(rules, longest):
    original = rules.pop("original_max_position_embeddings")
    factor = rules.pop("factor") or longest / original
    magnitude = rules.pop("attention_factor", None)
    over, under = rules.pop("mscale", None), rules.pop("mscale_all_dim", None)
    if magnitude is None and over and under:
        # DeepSeek's: the ratio of two of the paper's magnitudes.
        magnitude = _yarn_magnitude(factor, over) / _yarn_magnitude(factor, under)
    truncate = rules.pop("truncate", None)
    return YarnScaling(
        factor,
        original,
        beta_fast=rules.pop("beta_fast", None) or 32.0,
        beta_slow=rules.pop("beta_slow", None) or 1.0,
        magnitude=magnitude,
        truncate=True if truncate is None else truncate,
    )


def _yarn_magnitude(factor, weight):
    scaling = YarnScaling(factor, 1)
    return weight * (scaling.magnitude - 1) + 1


SCALINGS = {
    "default": lambda rules, longest: None,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


def describe_rotary(position, head_dim):
    """Returns the fields of a `RotaryPosition`, in the spelling all readers know."""
    scaling = getattr(position, "scaling", None)
    theta = getattr(position, "max_wavelength", 10_000.0)
    rules = None
    if isinstance(scaling, NtkScaling) and head_dim > 2:
        # Its rule is another base, and nothing else.
        theta *= scaling.factor ** (head_dim / (head_dim - 2))
    elif isinstance(scaling, LinearScaling):
        rules = {"rope_type": "linear", "factor": scaling.factor}
    elif isinstance(scaling, Llama3Scaling):
        rules = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_max_length,
        }
    elif isinstance(scaling, YarnScaling):
        rules = {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_max_length,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "attention_factor": scaling.magnitude,
            "truncate": scaling.truncate,
        }
    return {"rope_theta": theta, "rope_scaling": rules}
