"""The transformer, one justified piece at a time, as reusable Keras layers."""

from keras_tx._backend import require_backend

require_backend()

from keras_tx._version import __version__  # noqa: E402
from keras_tx.attention import MultiHead, ScaledAttention  # noqa: E402
from keras_tx.blocks import TransformerBlock  # noqa: E402
from keras_tx.data import mask_tokens, next_token, pack  # noqa: E402
from keras_tx.embeddings import LearnedSegment, TokenEmbedding  # noqa: E402
from keras_tx.feed_forward import FeedForward, gelu_tanh  # noqa: E402
from keras_tx.generation import generate, prefill, stream  # noqa: E402
from keras_tx.inspection import (  # noqa: E402
    AttentionHealth,
    attention_maps,
    plot_attention,
)
from keras_tx.losses import ChunkedCrossentropy  # noqa: E402
from keras_tx.models import LanguageModel, decoder, encoder, encoder_decoder  # noqa: E402
from keras_tx.norms import RMSNorm  # noqa: E402
from keras_tx.positions import (  # noqa: E402
    AlibiPosition,
    LearnedPosition,
    LinearScaling,
    Llama3Scaling,
    NtkScaling,
    RelativePosition,
    RotaryPosition,
    SinusoidalPosition,
    YarnScaling,
)
from keras_tx.pretrained import (  # noqa: E402
    load_pretrained,
    load_tokenizer,
    save_pretrained,
)
from keras_tx.sampling import (  # noqa: E402
    Beam,
    Constrain,
    Greedy,
    MinP,
    NoRepeatNGrams,
    PresencePenalty,
    RepetitionPenalty,
    Sampler,
    Temperature,
    TopK,
    TopP,
)

__all__ = [
    "AlibiPosition",
    "AttentionHealth",
    "Beam",
    "ChunkedCrossentropy",
    "Constrain",
    "FeedForward",
    "Greedy",
    "LanguageModel",
    "LearnedPosition",
    "LearnedSegment",
    "LinearScaling",
    "Llama3Scaling",
    "MinP",
    "MultiHead",
    "NoRepeatNGrams",
    "NtkScaling",
    "PresencePenalty",
    "RMSNorm",
    "RelativePosition",
    "RepetitionPenalty",
    "RotaryPosition",
    "Sampler",
    "ScaledAttention",
    "SinusoidalPosition",
    "Temperature",
    "TokenEmbedding",
    "TopK",
    "TopP",
    "TransformerBlock",
    "YarnScaling",
    "__version__",
    "attention_maps",
    "decoder",
    "encoder",
    "encoder_decoder",
    "gelu_tanh",
    "generate",
    "load_pretrained",
    "load_tokenizer",
    "mask_tokens",
    "next_token",
    "pack",
    "plot_attention",
    "prefill",
    "save_pretrained",
    "stream",
]
