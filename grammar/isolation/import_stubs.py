"""Imports a grammar library without the heavy modules that it imports but does not need.

xgrammar imports torch and transformers for functions that a compile never calls: 2 s and 200 MiB
before the first grammar, against 0.3 s and 60 MiB without. Workers replace them with stub modules,
which are enough for annotations, base classes and constants only. The engine's process, in which
others may use the library too, does without transformers until one of its classes is asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

HEAVY = ("torch", "transformers")
# Disables its torch support if torch cannot be imported, but would trip over a stub.
BEFORE = "tvm_ffi"


class StubName:
    """Any name of a stub module; may be referenced, not used."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...


class Stub(ModuleType):
    """A module of whose public names each is what `make` makes of it, by default `StubName`."""

    def __init__(self, name: str, make: Callable[[str], Any] = lambda _: StubName) -> None:
        super().__init__(name)
        self.__spec__, self._make = ModuleSpec(name, None), make

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._make(name)


def import_light(module: str) -> ModuleType:
    """Import a module with stubs in place of the heavy modules.

    Raises:
        Exception: whatever the import raises if some module needs the real one. The process is
            then in a mixed state and must not be used any further.
    """
    hidden: dict[str, Any] = dict.fromkeys(HEAVY)
    sys.modules.update(hidden)
    if importlib.util.find_spec(BEFORE) is not None:
        importlib.import_module(BEFORE)
    sys.modules.update({name: Stub(name) for name in HEAVY})
    return importlib.import_module(module)


class _Awaited(type):
    """A class of a module that is imported when an object is first tested against the class."""

    def __instancecheck__(cls, thing: object) -> bool:
        real: type = getattr(importlib.import_module(cls.__module__), cls.__name__)
        return isinstance(thing, real)


@contextmanager
def awaiting(module: str) -> Iterator[None]:
    """Let what is imported in the block have the classes of ``module`` without importing it.

    They are good for annotations and ``isinstance``. Where the module is there already, or is not
    installed, nothing is changed.
    """
    if module in sys.modules or importlib.util.find_spec(module) is None:
        yield
        return
    with _standing_in(Stub(module, lambda name: _Awaited(name, (), {"__module__": module}))):
        yield


@contextmanager
def doing_without(module: str) -> Iterator[None]:
    """Let what is imported in the block find names of ``module`` also where it is not installed.

    They are good for annotations and base classes.
    """
    if importlib.util.find_spec(module) is not None:
        yield
        return
    if importlib.util.find_spec(BEFORE) is not None:
        importlib.import_module(BEFORE)
    with _standing_in(Stub(module)):
        yield


@contextmanager
def _standing_in(stub: Stub) -> Iterator[None]:
    name = stub.__name__
    before = {name: sys.modules[name]} if name in sys.modules else {}
    sys.modules[name] = stub
    try:
        yield
    finally:
        if sys.modules.get(name) is stub:
            del sys.modules[name]
            sys.modules.update(before)
