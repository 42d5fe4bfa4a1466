"""Finds the parts of a model that a builder made."""

from keras_tx.feed_forward import activation_config


class Parts:
    """The layers of a model by what they are, for writing its config.

    Args:
        model: A model of `keras_tx.decoder`, `encoder` or `encoder_decoder`.
        prefix: What stands before the names of its blocks.
    """

    def __init__(self, model, prefix=""):
        self.layers = {layer.name: layer for layer in model.layers}
        self.prefix = prefix
        self.num_blocks = 0
        while f"{prefix}block_{self.num_blocks}" in self.layers:
            self.num_blocks += 1

    def get(self, name):
        """Returns a layer by name, or `None`."""
        return self.layers.get(name)

    def _need(self, name):
        if name not in self.layers:
            raise ValueError(f"it has no layer named '{name}'")
        return self.layers[name]

    def block(self, index):
        """Returns a block."""
        return self._need(f"{self.prefix}block_{index}")

    @property
    def embedding(self):
        """The `TokenEmbedding`."""
        return self._need("embedding")

    @property
    def dim(self):
        """Number of features."""
        return self.embedding.dim

    @property
    def heads(self):
        """The self-attention of the first block."""
        return self.block(0).attention

    @property
    def head_dim(self):
        """Size of a head."""
        return self.heads.head_dim or self.dim // self.heads.num_heads

    @property
    def hidden_dim(self):
        """Width of the feed-forward layers."""
        return self.block(0).feed_forward.hidden_dim

    @property
    def activation(self):
        """Our name of the activation of the feed-forward layers."""
        return activation_config(self.block(0).feed_forward.activation)

    @property
    def epsilon(self):
        """Epsilon of the norms."""
        norm = getattr(self.block(0), "attention_norm", None)
        return getattr(norm, "epsilon", 1e-5)

    @property
    def longest(self):
        """Number of tokens that positions are known for, or a usual one."""
        position = self.get("position")
        if hasattr(position, "max_length"):
            return position.max_length
        scaling = getattr(self.heads.position, "scaling", None)
        length = getattr(scaling, "original_max_length", None)
        return 4096 if length is None else int(length * scaling.factor)

    def window(self, index):
        """Returns the window of a block, or `None`."""
        return self.block(index).attention.attention.window

    def dropout(self, name):
        """Returns the rate of a dropout layer, or 0."""
        return getattr(self.get(name), "rate", 0.0)

    def describe_embedding(self):
        """Returns the fields about tokens."""
        return {
            "vocab_size": self.embedding.vocab_size,
            "pad_token_id": self.embedding.pad_id,
            "tie_word_embeddings": self.embedding.tie_weights,
        }
