"""What a user writes on top of keras_tx, registered as a user would."""

import keras
from keras import ops

import keras_tx as tx

register = keras.saving.register_keras_serializable("user_layers")


@register
def squared_relu(x):
    return ops.square(ops.relu(x))


@register
class TemperedMultiHead(tx.MultiHead):
    """Self-attention whose queries are divided by a learned temperature."""

    def __init__(self, num_heads, *, start=1.0, **kwargs):
        super().__init__(num_heads, **kwargs)
        self.start = start

    def build(self, query_shape):
        self.temperature = self.add_weight(
            name="temperature",
            shape=(query_shape[-1],),
            initializer=keras.initializers.Constant(self.start),
        )
        super().build(query_shape)

    def call(
        self,
        query,
        query_mask=None,
        key_mask=None,
        attention_mask=None,
        bias=None,
        positions=None,
        segment_ids=None,
        return_attention_scores=False,
        use_causal_mask=False,
        training=None,
    ):
        return super().call(
            query / ops.cast(self.temperature, query.dtype),
            query_mask=query_mask,
            key_mask=key_mask,
            attention_mask=attention_mask,
            bias=bias,
            positions=positions,
            segment_ids=segment_ids,
            return_attention_scores=return_attention_scores,
            use_causal_mask=use_causal_mask,
            training=training,
        )

    def get_config(self):
        return {**super().get_config(), "start": self.start}


@register
class Shifted(keras.layers.Layer):
    """A feed-forward layer that looks one token ahead."""

    def call(self, x):
        return ops.roll(x, -1, axis=1)

    def compute_output_shape(self, x_shape):
        return x_shape


@register
class Tagger(keras.Model):
    """A subclassed model: labels each token of a text."""

    def __init__(self, vocab_size, dim, num_labels, **kwargs):
        super().__init__(**kwargs)
        self.vocab_size = vocab_size
        self.dim = dim
        self.num_labels = num_labels
        self.embedding = tx.TokenEmbedding(vocab_size, dim, pad_id=0)
        self.position = tx.SinusoidalPosition()
        self.blocks = [
            tx.TransformerBlock(4, 2 * dim, norm="rms", name=f"block_{index}")
            for index in range(2)
        ]
        self.labels = keras.layers.Dense(num_labels)

    def call(self, tokens, training=None):
        x = self.position(self.embedding(tokens))
        for block in self.blocks:
            x = block(x, training=training)
        return self.labels(x)

    def get_config(self):
        return {
            **super().get_config(),
            "vocab_size": self.vocab_size,
            "dim": self.dim,
            "num_labels": self.num_labels,
        }
