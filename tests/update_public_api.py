"""Writes down the public API: names, signatures, defaults, methods of our own.

    python tests/update_public_api.py

rewrites `tests/public_api.txt`, which `tests/test_public_api.py` compares with
the code. What the diff of that file shows is what users will notice.
"""

import inspect
import pathlib

import keras_tx

SNAPSHOT = pathlib.Path(__file__).parent / "public_api.txt"

# What Keras asks of every layer; users call none of it.
KERAS_HOOKS = {
    "build",
    "compute_mask",
    "compute_output_shape",
    "compute_output_spec",
    "from_config",
    "get_config",
    "rematerialized_call",
    "variable_serialization_spec",
}


def signature(function, *, bound):
    """Returns the arguments of `function`, one a line, in brackets.

    Args:
        function: Anything callable.
        bound: Whether to leave out the first argument, `self`.
    """
    parameters = list(inspect.signature(function).parameters.values())
    lines, keyword_only = [], False
    for parameter in parameters[1 if bound else 0 :]:
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            lines.append("*")
        keyword_only = parameter.kind in (
            parameter.KEYWORD_ONLY,
            parameter.VAR_POSITIONAL,
        )
        lines.append(str(parameter))
    if not lines:
        return "()"
    return "(\n" + "".join(f"        {line},\n" for line in lines) + "    )"


def describe_class(name, kind):
    # The nearest one that users know.
    base = next(
        b
        for b in kind.__mro__[1:]
        if not b.__name__.startswith("_")
        and (b.__name__ in keras_tx.__all__ or not b.__module__.startswith("keras_tx"))
    )
    text = f"class {name}({base.__name__})\n"
    text += f"    __init__{signature(kind.__init__, bound=True)}\n"
    own = [base for base in kind.__mro__ if base.__module__.startswith("keras_tx")]
    members = {}
    for base in reversed(own):
        members.update(vars(base))
    for member, value in sorted(members.items()):
        if member.startswith("_") or member in KERAS_HOOKS:
            continue
        if isinstance(value, property):
            text += f"    {member}: property\n"
        elif isinstance(value, (classmethod, staticmethod)):
            bound = isinstance(value, classmethod)
            text += f"    {member}{signature(value.__func__, bound=bound)}\n"
        elif inspect.isfunction(value):
            text += f"    {member}{signature(value, bound=True)}\n"
    return text


def describe():
    """Returns the public API as text, sorted by name."""
    parts = []
    for name in sorted(keras_tx.__all__):
        value = getattr(keras_tx, name)
        if inspect.isclass(value):
            parts.append(describe_class(name, value))
        elif callable(value):
            parts.append(f"def {name}{signature(value, bound=False)}\n")
        else:
            parts.append(f"{name}: {type(value).__name__}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    SNAPSHOT.write_text(describe(), encoding="utf-8")
    print(f"Wrote {SNAPSHOT}.")
