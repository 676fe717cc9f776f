"""Torch's private ways to TorchScript, which recorded passes on the CPU are made of; all are here.

A trace has no branches, loops, lists or texts, and is run by torch alone. :func:`traceable` gives a
function that has them a place in one; :class:`Trace` is a pass as torch runs it without Python.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.jit._trace import is_tracing as is_tracing

P = ParamSpec("P")
R = TypeVar("R")
Tensors = tuple[Tensor, ...]


def traceable(work: Callable[P, R]) -> Callable[P, R]:
    """``work`` as it is, and in TorchScript inside a trace.

    Its module must not import ``annotations`` from ``__future__``; TorchScript reads those of
    ``work``, and knows none that is newer than ``Optional``, ``Union`` and ``List``. What ``work``
    calls is compiled with it. Compiled once a process, as compiled functions are never freed.
    """

    @wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        chosen: Callable[P, R] = scripted(work) if is_tracing() else work
        return chosen(*args, **kwargs)

    return run


@cache
def scripted(work: Callable[..., Any]) -> Any:
    """``work`` in TorchScript."""
    with warnings.catch_warnings():
        # That TorchScript is old.
        warnings.simplefilter("ignore")
        return torch.jit.script(getattr(work, "__wrapped__", work))


class Trace:
    """The operations of a pass in the order in which they were seen.

    What ``torch.jit.trace`` makes belongs to the process and is never freed, some 25 MB an engine.
    So the graph is traced by itself, with all that it touches as inputs, and owned here.

    Args:
        work: The pass.
        inputs: For which it is traced.
        touched: Every parameter and buffer that ``work`` may touch: another would be taken for a
            constant.

    Attributes:
        function: The graph, whose inputs are those of ``work`` and ``held``.
        held, owners: What it touches; and the same as a list of torch's own.
    """

    def __init__(self, work: Callable[..., Tensors], inputs: Tensors, touched: list[Tensor]):
        with warnings.catch_warnings():
            # That sizes are read: those of a tier.
            warnings.simplefilter("ignore")
            graph, _ = torch._C._create_graph_by_tracing(
                lambda *given: work(*given[: len(inputs)]),
                [*inputs, *touched],
                lambda _: "",
                strict=True,
                force_outplace=False,
            )
        used = [bool(value.uses()) for value in graph.inputs()][len(inputs) :]
        for index in reversed(range(len(touched))):
            if not used[index]:
                graph.eraseInput(len(inputs) + index)
        self.held = [tensor for tensor, is_used in zip(touched, used, strict=True) if is_used]
        self.owners = owned(self.held)
        self.function = torch._C._create_function_from_graph("recorded", graph)

    def __call__(self, *inputs: Tensor) -> Tensors:
        outputs: Tensors = replay(self.function, inputs, *self.held)
        return outputs


def owned(tensors: Sequence[Tensor]) -> Any:
    """Tensors in a list of torch's own.

    What its Python object alone owns takes the interpreter's lock when another owner comes or goes:
    in a replay once a tensor, beside a host that holds the lock.
    """
    return torch._C.ScriptList(list(tensors))


def replay(function: Any, inputs: Sequence[Tensor], *more: Any) -> Any:
    """What a compiled function gives for ``inputs`` and ``more``."""
    owners = owned(inputs)
    # Its optimiser is for graphs that can be fused: here it would cost time and give none.
    with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
        outputs = function(*inputs, *more)
    del owners
    return outputs


def compiled(source: str, name: str, names: Mapping[str, Any]) -> Any:
    """The function ``name`` that ``source`` defines, which calls others by ``names``.

    In TorchScript where some of these are traces: a loop over traces needs no interpreter's lock
    between them. Else in Python.
    """
    if not any(isinstance(named, Trace) for named in names.values()):
        space = {"Tensor": Tensor, "List": list, **names}
        exec(source, space)
        return space[name]
    unit = torch._C.CompilationUnit()
    functions = {name: _callable(named) for name, named in names.items()}
    unit.define(source, functions.get)  # type: ignore[arg-type]
    function = getattr(unit, name)
    # A compiled function does not hold those that it calls.
    return lambda *given, held=functions: function(*given)  # noqa: ARG005


def _callable(named: Any) -> Any:
    if isinstance(named, Trace):
        return named.function
    return scripted(named) if isinstance(named, FunctionType) else named
