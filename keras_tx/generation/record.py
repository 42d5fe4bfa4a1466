"""Steps on torch, written down as the operations that they come to.

torch computes as it goes: a token of four small layers passes a thousand calls of
Keras, which take ten times as long as what they compute. Written down after some
steps, later ones are the operations alone.
"""

import collections
import contextlib
import contextvars
import types

import keras

# Steps that are taken as they are before one is written down, which takes as long.
PATIENCE = 32

_recorder: contextvars.ContextVar = contextvars.ContextVar(
    "keras_tx_recorder", default=None
)


def recorder():
    """Returns the `Recorder` of this thread's compiled function, or `None`."""
    return _recorder.get()


class Recorder:
    """Records of a model's steps on torch.

    Weights are in a record themselves, not copies, so that it follows them as they
    change.

    Args:
        variables: Those of the models that take part.
    """

    def __init__(self, variables):
        self.variables = variables
        self.values = []
        self.records = {}
        self.calls = collections.Counter()

    @contextlib.contextmanager
    def open(self):
        """Is what `recorder()` returns in this thread."""
        # A value that was put in place of another is not in the records.
        values = [variable.value for variable in self.variables]
        if [id(x) for x in values] != [id(x) for x in self.values]:
            self.records = {}
        self.values = values
        token = _recorder.set(self)
        try:
            yield
        finally:
            _recorder.reset(token)

    def __call__(self, key, function, *args):
        """Returns `function(*args)`, by its record where there is one."""
        key = (
            key,
            *(
                (x.shape, x.dtype, x.stride(), x.storage_offset())
                for x in _tensors(args)
            ),
        )
        found = self.records.get(key)
        if found is None:
            self.calls[key] += 1
            if self.calls[key] <= PATIENCE:
                return function(*args)
            found = self.records[key] = record(function, args)
        return found(*args)


def record(function, args):
    """Returns a function of tensors on torch as the operations that it comes to.

    Args:
        function: Function of structures of tensors and `None`.
        args: What it is recorded with. Later calls have tensors of the same shapes.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    shape = keras.tree.map_structure(lambda x: x is not None, args)
    returned = []

    def of_tensors(*tensors):
        rest = iter(tensors)
        leaves = [next(rest) if given else None for given in keras.tree.flatten(shape)]
        result = function(*keras.tree.pack_sequence_as(shape, leaves))
        returned[:] = [keras.tree.map_structure(lambda x: 0, result)]
        return keras.tree.flatten(result)

    # Fake tensors have no values, so that none can become a part of the record.
    make = make_fx(of_tensors, tracing_mode="fake", _allow_non_fake_inputs=True)
    try:
        module = make(*_tensors(args))
    except Exception:
        # Something reads a value, as a layer or constraint of the user's may.
        return function
    tidy(module)

    def run(*args):
        return keras.tree.pack_sequence_as(returned[0], module(*_tensors(args)))

    return run


def _tensors(args):
    return [x for x in keras.tree.flatten(args) if x is not None]


def tidy(module):
    """Takes out of a record what need not be computed at each step.

    What follows from constants is computed here, and what is computed twice once.
    Views of weights are made here too: they see the weights change.

    Args:
        module: A `torch.fx.GraphModule`.
    """
    import torch

    graph, constants, weights, same = module.graph, {}, {}, {}
    whose = {}  # node -> what it is a view of
    for node in graph.nodes:
        shares = node.op == "call_function" and _shares(node.target)
        whose[node] = whose[node.args[0]] if shares else node
    written = {
        whose[node.args[0]]
        for node in graph.nodes
        if node.op == "call_function" and _writes(node.target)
    }

    def reads_what_is_written(node):
        return any(whose[x] in written for x in node.all_input_nodes)

    def evaluate(node, known):
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda x: known[x])
        return node.target(*args, **kwargs)

    for node in list(graph.nodes):
        if node.op == "get_attr":
            value = getattr(module, node.target)
            is_weight = not str(node.target).startswith("_tensor_constant")
            (weights if is_weight else constants)[node] = value
            continue
        if node.op != "call_function" or _writes(node.target):
            continue
        inputs = node.all_input_nodes
        fixed = whose[node] not in written and not _draws(node.target)
        if fixed and all(x in constants for x in inputs):
            constants[node] = evaluate(node, constants)
        elif inputs and _views(node.target) and all(x in weights for x in inputs):
            weights[node] = evaluate(node, weights)
        elif not _draws(node.target) and (
            _views(node.target) or not reads_what_is_written(node)
        ):
            key = (node.target, repr(node.args), repr(node.kwargs))
            first = same.setdefault(key, node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)
    for index, (node, value) in enumerate((constants | weights).items()):
        if node.op == "call_function" and isinstance(value, torch.Tensor):
            module.register_buffer(f"_kept_{index}", value, persistent=False)
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.get_attr(f"_kept_{index}"))
    graph.eliminate_dead_code()
    _shorten(graph)
    graph.eliminate_dead_code()
    _bind(module)
    module.recompile()


def _shorten(graph):
    """Makes one view of views of views, and none of those that change nothing."""
    import torch

    def place(node):
        x = node.meta["val"]
        return tuple(x.shape), tuple(x.stride()), x.storage_offset()

    roots = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not _views(node.target):
            continue
        if not isinstance(node.meta.get("val"), torch.Tensor):
            continue  # several views at once
        before = node.args[0]
        roots[node] = root = roots.get(before, before)
        if "val" not in root.meta or root.meta["val"].dtype != node.meta["val"].dtype:
            roots[node] = node
        elif place(root) == place(node):
            node.replace_all_uses_with(root)
        elif root is not before:
            node.target = torch.ops.aten.as_strided.default
            node.args, node.kwargs = (root, *map(_plain, place(node))), {}


def _bind(module):
    """Calls operations and reads weights by the shortest way there is in Python.

    An operation by its overload, such as `torch.ops.aten.add.Tensor`, looks at its
    schema in each call: for a view that is three times what `torch.add` and its like
    take. A module looks for weights in three places.
    """
    import torch

    for node in module.graph.nodes:
        if node.op == "get_attr":
            value = getattr(module, node.target)
            if node.target not in vars(module):
                delattr(module, node.target)
                vars(module)[node.target] = value
        elif isinstance(node.target, torch._ops.OpOverload):
            schema = node.target._schema
            space, _, plain_name = schema.name.partition("::")
            plain = getattr(torch, plain_name, None)
            if space == "aten" and isinstance(plain, types.BuiltinFunctionType):
                node.target = plain
            elif space == "aten" and hasattr(torch.Tensor, plain_name):
                node.op, node.target = "call_method", plain_name


def _plain(x):
    return list(x) if isinstance(x, tuple) else x


def _writes(target):
    schema = getattr(target, "_schema", None)
    return schema is not None and schema.is_mutable


def _shares(target):
    """Whether what an operation returns lies where its first argument does."""
    schema = getattr(target, "_schema", None)
    return schema is not None and any(x.alias_info is not None for x in schema.returns)


def _draws(target):
    import torch

    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def _views(target):
    return _shares(target) and not _writes(target)
