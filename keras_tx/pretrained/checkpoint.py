"""Folders of config.json and safetensors: what they hold, checked, and back."""

import json
import math
import os
import pathlib
import shutil
import tempfile

import ml_dtypes  # comes with Keras; NumPy itself has no bfloat16
import numpy as np

from keras_tx.pretrained.deferred import aligned_empty

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

# What weights may be stored as. Quantized ones need scales that no table has.
FLOATS = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
}

# How many numbers are converted at a time.
PIECE = 1 << 18

# Beyond this many bytes a checkpoint is written as several files.
SHARD_BYTES = 5_000_000_000


def require(package, install='"keras-tx[pretrained]"'):
    """Imports an optional package, or says which line installs it."""
    try:
        return __import__(package, fromlist=["_"])
    except ImportError as error:
        raise ImportError(
            f"Pretrained files need the package `{package.split('.')[0]}`. Install "
            f"it with: pip install {install}"
        ) from error


def read_json(path):
    """Returns the object in a JSON file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"'{path}' is not a readable JSON file: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"'{path}' must hold a JSON object. Received: {type(content).__name__}."
        )
    return content


class Folder:
    """A checkpoint on disk: its config, and its tensors by name.

    Nothing but headers is read until `read` asks for a tensor, and nothing is
    ever unpickled.

    Args:
        path: Folder with `config.json` and `model.safetensors`, or the index
            of several such files.

    Raises:
        ValueError: If files are missing, damaged, or point outside the folder.
    """

    def __init__(self, path):
        self.path = pathlib.Path(path)
        if not (self.path / CONFIG).is_file():
            raise ValueError(
                f"`load_pretrained` reads a folder with '{CONFIG}' and "
                f"'{WEIGHTS}', or a '.gguf' file. Received: '{path}', where there "
                f"is no '{CONFIG}'. To fetch a model of a hub, download its "
                "folder first, for example with "
                "`huggingface_hub.snapshot_download`."
            )
        self.config = read_json(self.path / CONFIG)
        self._headers = {}
        for file, listed in self._weight_files():
            self._read_header(file, listed)

    def _weight_files(self):
        """Yields each file and the names that the index promises of it."""
        if (self.path / WEIGHTS).is_file():
            yield WEIGHTS, None
            return
        if not (self.path / INDEX).is_file():
            pickled = sorted(p.name for p in self.path.glob("*.bin"))
            raise ValueError(
                f"There is no '{WEIGHTS}' in '{self.path}'."
                + (
                    f" {pickled} are pickled, and unpickling runs whatever code a "
                    "file holds. Convert them where you trust them: "
                    "`transformers`' `model.save_pretrained(folder)` writes "
                    "safetensors."
                    if pickled
                    else " Export it in the safetensors format."
                )
            )
        files = {}
        weight_map = read_json(self.path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"'{self.path / INDEX}' has no `weight_map`.")
        for name, file in weight_map.items():
            # Only names: links may lead elsewhere, as in the hub's own cache.
            if not isinstance(file, str) or not _is_file_name(file):
                raise ValueError(
                    f"The index '{self.path / INDEX}' must name files in its own "
                    f"folder. Received: {file!r} for the tensor '{name}'."
                )
            files.setdefault(file, []).append(name)
        yield from sorted(files.items())

    def _read_header(self, file, listed):
        safetensors = require("safetensors")
        path = self.path / file
        if not path.is_file():
            raise ValueError(f"'{INDEX}' names the file '{path}', which is missing.")
        try:
            # Checks that sizes, offsets and the file's length agree.
            with safetensors.safe_open(path, framework="numpy"):
                pass
        except safetensors.SafetensorError as error:
            raise ValueError(
                f"'{path}' is not a sound safetensors file ({error}). Download it "
                "again."
            ) from error
        with path.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            header = json.loads(handle.read(length))
        header.pop("__metadata__", None)
        found = {
            name: (
                tuple(entry["shape"]),
                entry["dtype"],
                path,
                8 + length + entry["data_offsets"][0],
            )
            for name, entry in header.items()
        }
        if listed is not None and set(listed) != set(found):
            odd = sorted(set(listed) ^ set(found))
            raise ValueError(
                f"'{INDEX}' and '{path}' disagree about the tensors {odd[:5]}."
            )
        self._headers.update(found)

    @property
    def names(self):
        """Names of the tensors."""
        return list(self._headers)

    def shape(self, name):
        """Returns the shape of a tensor, from the header."""
        return self._headers[name][0]

    def check_dtype(self, name):
        """Refuses a tensor that holds no plain floats."""
        dtype = self._headers[name][1]
        if dtype not in FLOATS:
            raise ValueError(
                f"The tensor '{name}' is stored as {dtype}. Weights are read from "
                f"{', '.join(FLOATS)}; save a version that is not quantized."
            )

    def read(self, name, dtype):
        """Returns a tensor as a NumPy array of its own, in a dtype.

        Read and converted piece by piece rather than mapped, for mapped pages
        count as memory in use until the whole file is done with.
        """
        shape, stored, path, offset = self._headers[name]
        array = aligned_empty((math.prod(shape),), dtype)
        with path.open("rb") as handle:
            handle.seek(offset)
            if array.dtype == FLOATS[stored]:
                handle.readinto(array.view(np.uint8))
            else:
                for start in range(0, array.size, PIECE):
                    piece = np.empty(min(PIECE, array.size - start), FLOATS[stored])
                    handle.readinto(piece.view(np.uint8))
                    array[start : start + piece.size] = piece
        return array.reshape(shape)


def _is_file_name(name):
    return (
        name not in ("", ".", "..")
        and name == pathlib.PurePosixPath(name).name
        and name == pathlib.PureWindowsPath(name).name
    )


def write_folder(path, config, tensors, shard_bytes=None):
    """Writes `config.json` and safetensors; all of it, or nothing.

    Args:
        path: The folder, made if missing.
        config: Dict for `config.json`.
        tensors: List of `(name, num_bytes, function that returns the array)`.
        shard_bytes: Size from which to split. Default: `SHARD_BYTES`.

    Raises:
        ValueError: If the folder holds other weights, which readers might
            prefer to the new ones.
    """
    path = pathlib.Path(path)
    shards = _shards(tensors, shard_bytes or SHARD_BYTES)
    _refuse_stale_weights(path, shards)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = pathlib.Path(
        tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.absolute().parent)
    )
    try:
        _write_weights(temporary, shards)
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (temporary / CONFIG).write_text(text, encoding="utf-8")
        path.mkdir(exist_ok=True)
        # The config last: a folder without one is no checkpoint.
        for file in sorted(temporary.iterdir(), key=lambda file: file.name == CONFIG):
            os.replace(file, path / file.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _shards(tensors, shard_bytes):
    """Returns `{file name: tensors}`, in order."""
    groups, size = [[]], 0
    for tensor in tensors:
        if groups[-1] and size + tensor[1] > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor[1]
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    return {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": group
        for number, group in enumerate(groups, 1)
    }


def _refuse_stale_weights(path, shards):
    if path.exists() and not path.is_dir():
        raise ValueError(f"`save_pretrained` writes a folder; '{path}' is a file.")
    ours = {*shards, INDEX} if len(shards) > 1 else set(shards)
    stale = sorted(
        file.name
        for pattern in ("*.safetensors", "*.safetensors.index.json", "*.bin")
        for file in path.glob(pattern)
        if file.name not in ours
    )
    if stale:
        raise ValueError(
            f"'{path}' holds other weights, {stale}, that a reader might take for "
            "those of this model. Choose an empty folder, or remove them first."
        )


def _write_weights(folder, shards):
    safetensors = require("safetensors.numpy")
    for file, group in shards.items():
        arrays = {name: np.ascontiguousarray(make()) for name, _, make in group}
        safetensors.save_file(arrays, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(t[1] for g in shards.values() for t in g)},
            "weight_map": {t[0]: file for file, group in shards.items() for t in group},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
