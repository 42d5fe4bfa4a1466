"""The few sizes that prompts and texts of all lengths are padded to."""

from keras_tx import cache

# A longer prompt is read in pieces of this many tokens, so that the memory of
# the pass does not grow with the square of its length.
PROMPT_CHUNK = 512


def power_of_two(size, least):
    """Returns `least`, doubled until `size` fits."""
    bucket = least
    while bucket < size:
        bucket *= 2
    return bucket


def prompt_bucket(length):
    """Length that a prompt is padded to: powers of two, then whole pieces."""
    if length <= PROMPT_CHUNK:
        return min(power_of_two(length, 16), PROMPT_CHUNK)
    return -(-length // PROMPT_CHUNK) * PROMPT_CHUNK


def capacity_of(columns):
    """Columns to make room for: powers of two, then multiples of 1024."""
    if columns <= 2048:
        return power_of_two(columns, cache.BLOCK)
    return -(-columns // 1024) * 1024
