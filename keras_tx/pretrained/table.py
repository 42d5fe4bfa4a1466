"""Tables of names whose entries can be inverted, and what they promise.

A family is a tuple of rows: the name in the file, the path of the weight here,
and the form that turns one into the other and back.
"""

import dataclasses
import math
import re

import keras
import ml_dtypes
import numpy as np

from keras_tx.pretrained.deferred import settle

# ----------------------------------------------------------------------------
# Forms: a file's layout to ours, and back
# ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Same:
    """The file's array as it is."""

    def file_shape(self, *shapes):
        """Returns the shape in the file from those here."""
        return shapes[0]

    def read_dtype(self, dtype):
        """Returns the dtype to read in, for weights of a dtype."""
        return dtype

    def load(self, array, shapes):
        """Returns the arrays here from the file's."""
        return (array.reshape(shapes[0]),)

    def save(self, arrays):
        """Returns the file's array from those here."""
        return arrays[0].reshape(self.file_shape(arrays[0].shape))


@dataclasses.dataclass(frozen=True)
class Flat(Same):
    """One axis in the file, heads and their features here."""

    def file_shape(self, *shapes):
        return (math.prod(shapes[0]),)


@dataclasses.dataclass(frozen=True)
class Matrix(Same):
    """Inputs by outputs, of which either may be several axes here.

    Args:
        inputs: How many of our axes are inputs: 1, or 2 for heads.
        transposed: Whether the file has outputs first, as a torch `Linear`.
    """

    inputs: int = 1
    transposed: bool = True

    def file_shape(self, *shapes):
        ways = (
            math.prod(shapes[0][: self.inputs]),
            math.prod(shapes[0][self.inputs :]),
        )
        return ways[::-1] if self.transposed else ways

    def load(self, array, shapes):
        array = array.T if self.transposed else array
        return (array.reshape(shapes[0]),)

    def save(self, arrays):
        shape = self.file_shape(arrays[0].shape)
        if self.transposed:
            return arrays[0].reshape(shape[::-1]).T
        return arrays[0].reshape(shape)


@dataclasses.dataclass(frozen=True)
class PlusOne(Same):
    """A scale that the file stores as its distance from 1."""

    def read_dtype(self, dtype):
        # In bfloat16 the distance would be rounded, and then the sum.
        return np.float32

    def load(self, array, shapes):
        return (array + 1,)

    def save(self, arrays):
        return arrays[0].astype("float32") - 1


@dataclasses.dataclass(frozen=True)
class SkipRows(Same):
    """A table whose first rows are never looked up.

    Args:
        count: Number of rows that only the file has.
    """

    count: int

    def file_shape(self, *shapes):
        rows, *rest = shapes[0]
        return (rows + self.count, *rest)

    def load(self, array, shapes):
        return (array[self.count :],)

    def save(self, arrays):
        padding = np.zeros((self.count, *arrays[0].shape[1:]), arrays[0].dtype)
        return np.concatenate([padding, arrays[0]])


@dataclasses.dataclass(frozen=True)
class Joined(Same):
    """Several weights here that are one array in the file, on its last axis.

    Args:
        form: The form of each.
    """

    form: Same

    def file_shape(self, *shapes):
        parts = [self.form.file_shape(shape) for shape in shapes]
        return (*parts[0][:-1], sum(part[-1] for part in parts))

    def load(self, array, shapes):
        ends = np.cumsum([self.form.file_shape(shape)[-1] for shape in shapes])
        parts = np.split(array, ends[:-1], axis=-1)
        return tuple(
            self.form.load(part, (shape,))[0]
            for part, shape in zip(parts, shapes, strict=True)
        )

    def save(self, arrays):
        return np.concatenate([self.form.save((array,)) for array in arrays], -1)


SAME = Same()
FLAT = Flat()
LINEAR = Matrix()
LINEAR_FROM_HEADS = Matrix(inputs=2)

# ----------------------------------------------------------------------------
# Rows and families
# ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Row:
    """One tensor of the file and the weights that it holds.

    Args:
        file: Name in the file; `{i}` stands for the index of the layer.
        path: Path of the weight here, or several for `Joined`.
        form: How one becomes the other.
    """

    file: str
    path: str | tuple
    form: Same = SAME

    @property
    def paths(self):
        return (self.path,) if isinstance(self.path, str) else self.path


def dense(file, path, form=LINEAR):
    """Returns the rows of a projection: kernel, and bias where there is one.

    Args:
        file: Name in the file, without `.weight` and `.bias`.
        path: Path here, without `/kernel` and `/bias`.
        form: Form of the kernel.
    """
    return (
        Row(f"{file}.weight", f"{path}/kernel", form),
        Row(f"{file}.bias", f"{path}/bias", FLAT),
    )


def layer_norm(file, path):
    """Returns the rows of a layer norm: its scale and its shift."""
    return (
        Row(f"{file}.weight", f"{path}/gamma"),
        Row(f"{file}.bias", f"{path}/beta"),
    )


@dataclasses.dataclass(frozen=True)
class Family:
    """Everything that one family of checkpoints needs.

    Args:
        name: `model_type` of its config.
        architectures: `{class name: output}`, the classes that can be read;
            the first of each output is the one that is written.
        rows: Table of the model's body, without `prefix`.
        build: Function of a `Config` and `Options` that returns the model.
        describe: Function of a model that returns the fields of its config.
        prefix: What stands before names of the body in models with a head.
        heads: Table of what has no prefix.
        parts: `{output: beginnings of names}` that belong to one output only.
        tied: `{name: name}`, duplicates that must equal what they duplicate.
        buffers: Patterns of names that hold no weights.
        renamed: `{ending: ending}` of names in old files.
        tables: Optional function of config fields and output that returns
            `rows` and `heads`, where they depend on these.
    """

    name: str
    architectures: dict
    rows: tuple
    build: object
    describe: object
    prefix: str = ""
    heads: tuple = ()
    parts: dict = dataclasses.field(default_factory=dict)
    tied: dict = dataclasses.field(default_factory=dict)
    buffers: tuple = ()
    renamed: dict = dataclasses.field(default_factory=dict)
    tables: object = None

    def settled(self, fields, output):
        """Returns the family with the tables for one config and output."""
        if self.tables is None:
            return self
        rows, heads = self.tables(fields, output)
        return dataclasses.replace(self, rows=rows, heads=heads, tables=None)

    def plain_name(self, name):
        """Returns a file's name without prefix, in the new spelling."""
        name = name.removeprefix(self.prefix)
        for old, new in self.renamed.items():
            if name.endswith(old):
                return name.removesuffix(old) + new
        return name

    def expand(self, paths):
        """Yields each row that applies to a model, and whether it is of the body.

        Args:
            paths: Paths of the model's weights.
        """
        for row in (*self.rows, *self.heads):
            for index in range(len(paths)):
                filled = tuple(path.format(i=index) for path in row.paths)
                if not all(path in paths for path in filled):
                    break
                file = row.file.format(i=index)
                yield Row(file, filled, row.form), row in self.rows
                if file == row.file:
                    break


@dataclasses.dataclass(frozen=True)
class Options:
    """What a user may ask of a loaded model, checked against its family."""

    output: str | None = None
    pooler: bool = False
    token_types: bool = False
    packed: bool = False
    pad_id: int | str | None = "auto"
    dtype: object = None

    def check(self, family):
        """Refuses what a family's model has no use for."""
        if self.pooler and (self.output != "features" or "pooled" not in family.parts):
            raise ValueError(
                "`pooler=True` adds the pooled first token to the features of BERT "
                f"and RoBERTa. Received: family {family.name}, output "
                f"{self.output!r}."
            )
        if self.token_types and "pooled" not in family.parts:
            raise ValueError(
                f"`token_types=True` is for BERT and RoBERTa; {family.name} has no "
                "token types."
            )

    def padding(self, config, *, masked):
        """Returns the token that is masked as padding, or `None`.

        Args:
            config: The `Config`, for its `pad_token_id`.
            masked: Whether the config's token masks by itself.
        """
        of_config = config.get("pad_token_id")
        if self.pad_id == "auto":
            return of_config if masked else None
        return self.pad_id


# ----------------------------------------------------------------------------
# Matching
# ----------------------------------------------------------------------------


class Tensors:
    """The tensors of a checkpoint by the plain names of its family.

    Args:
        family: The `Family`.
        source: The checkpoint: `names`, `shape`, `check_dtype` and `read`.

    Raises:
        ValueError: If two tensors are one by their plain names.
    """

    def __init__(self, family, source):
        self.source = source
        self.names = {}
        for name in source.names:
            plain = family.plain_name(name)
            if plain in self.names:
                raise ValueError(
                    f"The tensors '{self.names[plain]}' and '{name}' are two of one "
                    "weight."
                )
            self.names[plain] = name

    def shape(self, plain):
        """Returns a shape."""
        return tuple(self.source.shape(self.names[plain]))

    def read(self, plain, dtype=np.float32):
        """Returns an array in a NumPy dtype."""
        return self.source.read(self.names[plain], dtype)

    def equal(self, first, second):
        """Whether two tensors are the same in every bit that counts."""
        if self.shape(first) != self.shape(second):
            return False
        for name in (first, second):
            self.source.check_dtype(self.names[name])
        return np.array_equal(self.read(first), self.read(second))


def match(family, tensors, model, output):
    """Returns `{id(variable): reader}` for all weights of a model.

    Every tensor of the file is used exactly once, or is a buffer, a head that
    was not asked for, or a duplicate of what it is tied to; every weight is
    filled, by a tensor of the right shape. All of it is settled from headers,
    before anything is allocated.

    Args:
        family: The `Family`, with its tables settled.
        tensors: The `Tensors` of the file.
        model: A model whose variables have shapes.
        output: The output of the model, a key of `family.parts`.

    Raises:
        ValueError: That lists what is left over, missing or misshapen.
    """
    weights = {variable.path: variable for variable in model.weights}
    readers, faults, used = {}, [], set()
    for row, _ in family.expand(dict(weights)):
        variables = [weights.pop(path) for path in row.paths]
        shapes = tuple(tuple(variable.shape) for variable in variables)
        if row.file not in tensors.names:
            faults.append(f"'{row.file}' is missing, for {', '.join(row.paths)}")
            continue
        used.add(row.file)
        expected, actual = row.form.file_shape(*shapes), tensors.shape(row.file)
        if actual != tuple(expected):
            faults.append(
                f"'{row.file}' has the shape {actual} where the config makes it "
                f"{tuple(expected)}"
            )
            continue
        tensors.source.check_dtype(tensors.names[row.file])
        for index, variable in enumerate(variables):
            readers[id(variable)] = _reader(tensors, row, shapes, index, variable)
    faults += [f"the weight '{path}' has no tensor" for path in weights]
    faults += _leftovers(family, tensors, used, output)
    if faults:
        raise ValueError(
            f"The file is not the {family.name} model that its config describes: "
            + "; ".join(faults[:12])
            + (f"; and {len(faults) - 12} more" if len(faults) > 12 else "")
            + "."
        )
    return readers


def _reader(tensors, row, shapes, index, variable):
    dtype = _numpy_dtype(keras.backend.standardize_dtype(variable.dtype))

    def read():
        array = tensors.read(row.file, row.form.read_dtype(dtype))
        return settle(row.form.load(array, shapes)[index], dtype)

    return read


def _numpy_dtype(dtype):
    return ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)


def _leftovers(family, tensors, used, output):
    """Returns faults of tensors that no weight asked for."""
    asked = family.parts.get(output, ())
    unasked = tuple(
        part
        for parts in family.parts.values()
        for part in parts
        if not asked or not part.startswith(asked)
    )
    faults = []
    for name in tensors.names:
        if name in used or any(re.fullmatch(p, name) for p in family.buffers):
            continue
        if name.startswith(unasked):
            continue
        original = family.tied.get(name)
        if original not in tensors.names:
            faults.append(f"'{name}' has no place in the model")
        elif not tensors.equal(name, original):
            faults.append(f"'{name}' is tied to '{original}' and differs from it")
    return faults


def unmatch(family, model, prefix):
    """Returns what `write_folder` takes: the model's weights in file layout.

    Args:
        family: The `Family`.
        model: A built model.
        prefix: What to put before names of the body.
    """
    weights = {variable.path: variable for variable in model.weights}
    tensors = []
    for row, in_body in family.expand(dict(weights)):
        variables = [weights.pop(path) for path in row.paths]
        name = (prefix if in_body else "") + row.file
        size = sum(_num_bytes(variable) for variable in variables)
        tensors.append((name, size, _writer(row.form, variables)))
    if weights:
        raise ValueError(
            f"The weights {sorted(weights)} have no place in a {family.name} file."
        )
    return tensors


def _writer(form, variables):
    def make():
        return form.save([keras.ops.convert_to_numpy(v) for v in variables])

    return make


def _num_bytes(variable):
    dtype = keras.backend.standardize_dtype(variable.dtype)
    return math.prod(variable.shape) * np.dtype(_numpy_dtype(dtype)).itemsize
