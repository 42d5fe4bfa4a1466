"""Normalization: names, templates, and the mask kept."""

import keras

from keras_tx.serialization import child_config, register

EPSILON = 1e-5


@register
class RMSNorm(keras.layers.RMSNormalization):
    """`keras.layers.RMSNormalization` that passes masks on.

    Divides each token by its root mean square over features and multiplies by
    a learned scale. See [Zhang and Sennrich, 2019](
    https://arxiv.org/abs/1910.07467). Keras' own layer drops the implicit mask,
    so that padding would count again behind it. `norm="rms"` makes one.

    Args:
        axis: Axis to normalize over.
        epsilon: Small number added to the mean square. Default: 1e-5.

    Call arguments:
        x: Features, `(B, T, D)`.

    Output shape:
        Same as `x`.

    Example:

    >>> x = keras.ops.ones((2, 5, 8)) * 3.0
    >>> keras_tx.RMSNorm()(x).shape
    (2, 5, 8)
    """

    def __init__(self, axis=-1, epsilon=EPSILON, **kwargs):
        super().__init__(axis=axis, epsilon=epsilon, **kwargs)
        self.supports_masking = True
        self._axis = axis

    def get_config(self):
        # Keras rewrites the axis in `build`; a config says what was asked for.
        return {**super().get_config(), "axis": self._axis}


class NormTemplate:
    """A norm as config: copied per place, so that kind and epsilon travel.

    Args:
        norm: `"layer"`, `"rms"`, `None` for no norm, or a Keras layer.

    Raises:
        ValueError: If `norm` is none of these.
    """

    def __init__(self, norm):
        if isinstance(norm, NormTemplate):
            norm = norm.config
        elif isinstance(norm, keras.layers.Layer):
            norm = child_config(norm)
            # The place names the copy; a name such as "rms_normalization_3"
            # would only tell how many layers were made before.
            norm["config"].pop("name", None)
        elif norm is not None and not (
            isinstance(norm, str) and norm in ("layer", "rms")
        ):
            raise ValueError(
                'A norm is "layer", "rms", None, or a Keras layer that serves '
                f"as a template. Received: {norm!r}."
            )
        # What goes into a parent's `get_config`.
        self.config = norm

    def make(self, name, dtype=None):
        """Returns a fresh norm, or `None` for no norm."""
        if self.config is None:
            return None
        if self.config == "layer":
            return keras.layers.LayerNormalization(
                epsilon=EPSILON, name=name, dtype=dtype
            )
        if self.config == "rms":
            return RMSNorm(name=name, dtype=dtype)
        norm = keras.saving.deserialize_keras_object(self.config)
        # The same arithmetic, but the mask survives.
        kind = type(norm)
        if kind is keras.layers.RMSNormalization:
            kind = RMSNorm
        config = {**norm.get_config(), "name": name}
        if dtype is not None:
            config["dtype"] = dtype
        norm = kind.from_config(config)
        # Who calls it hands the mask on; Keras would warn that it is lost.
        norm.supports_masking = True
        return norm
