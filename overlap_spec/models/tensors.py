"""What a checkpoint's files hold: tensors by name, quantised ones put together again."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from overlap_spec.errors import CheckpointError
from overlap_spec.gguf import file as gguf
from overlap_spec.models.config import read_json
from overlap_spec.models.dequantize import Grid, Grouped, Scheme, read_scheme

T = TypeVar("T")


class Stored(NamedTuple):
    """A tensor of a checkpoint: its name, and what reads it, or its shape alone."""

    name: str
    read: Callable[[], Tensor]
    shape: Callable[[], Sequence[int]]


def scheme_of(path: Path) -> Scheme | None:
    """How the checkpoint in folder ``path`` is quantised, if it is.

    Raises:
        CheckpointError: in a way that is not read; names the field.
    """
    # A draft module may come without.
    described = path / "config.json"
    hf = read_json(described) if described.exists() else {}
    given = hf.get("quantization_config") or hf.get("compression_config")
    # Where the first quantisers kept it.
    older = path / "quantize_config.json"
    if given is None and older.exists():
        given = {"quant_method": "gptq", **read_json(older)}
    return None if given is None else read_scheme(given)


def tensor_names(path: Path) -> set[str]:
    """Names of all tensors of the checkpoint in folder ``path``, without reading them."""
    return {each.name for each in _stored(path)}


def parameter_count(path: Path) -> int:
    """Elements of all tensors of the checkpoint in folder ``path``, without reading them.

    Raises:
        CheckpointError: a file cannot be read.
    """
    return sum(math.prod(each.shape()) for each in _stored(path))


def disk_bytes(path: Path) -> int:
    """Size of the files with the checkpoint's tensors, in bytes."""
    return sum(shard.stat().st_size for shard in _shards(path))


def read_tensors(path: Path, as_stored: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint in folder ``path``, shard by shard: memory-mapped, or in
    float32 where it is quantised; in place of each weight in ``as_stored`` (of
    :func:`grid_names`) the three parts of its :class:`Grid`."""
    for each in _stored(path, as_stored):
        yield each.name, each.read()


def grid_names(path: Path) -> dict[str, int]:
    """The weights of the checkpoint in folder ``path`` that can be read as a :class:`Grid`, and how
    many groups a row has, without reading them."""
    if (path / gguf.LINK).exists():
        return {name: groups for name, (groups, _) in gguf.grids(path / gguf.LINK).items()}
    scheme = scheme_of(path)
    if not isinstance(scheme, Grouped):
        return {}
    with ExitStack() as files:
        every = [each for shard in _shards(path) for each in _opened(shard, files)]
        groups, _ = _grouped(every, scheme)
        shapes = {
            weight: {part: each.shape() for part, each in parts.items()}
            for weight, parts in groups.items()
        }
    name, axis = scheme.scale
    return {
        weight: each[name][axis]
        for weight, each in shapes.items()
        if name in each and scheme.keeps(each)
    }


def _shards(path: Path) -> list[Path]:
    if (path / gguf.LINK).exists():
        return [path / gguf.LINK]
    for single in ("model.safetensors", "pytorch_model.bin"):
        index = path / f"{single}.index.json"
        if index.exists():
            return [path / name for name in sorted(set(read_json(index)["weight_map"].values()))]
        if (path / single).exists():
            return [path / single]
    raise CheckpointError(
        f"{path} holds neither model.safetensors nor pytorch_model.bin, nor an index of either"
    )


def _stored(path: Path, as_stored: Collection[str] = ()) -> Iterator[Stored]:
    shards, scheme = _shards(path), scheme_of(path)
    if scheme is None:
        for shard in shards:
            if shard.name == gguf.LINK:
                yield from _of_gguf(shard, as_stored)
                continue
            with ExitStack() as files:
                yield from _opened(shard, files)
        return
    # A weight's parts may lie in several shards.
    with ExitStack() as files:
        every = [each for shard in shards for each in _opened(shard, files)]
        yield from _assembled(every, scheme, as_stored)


def _opened(shard: Path, files: ExitStack) -> Iterator[Stored]:
    """The tensors of one file, which ``files`` closes."""
    if shard.suffix == ".bin":
        for name, tensor in _pickled(shard).items():
            yield Stored(name, partial(_itself, tensor), tensor.size)
        return
    try:
        file: Any = files.enter_context(safe_open(shard, framework="pt"))
    except (SafetensorError, FileNotFoundError) as error:
        raise CheckpointError(f"{shard} cannot be read: {error}") from None
    for name in file.keys():  # noqa: SIM118 (not a mapping)
        yield Stored(name, partial(file.get_tensor, name), file.get_slice(name).get_shape)


def _of_gguf(shard: Path, as_stored: Collection[str]) -> Iterator[Stored]:
    grids = gguf.grids(shard) if as_stored else {}
    for name, read, shape in gguf.stored(shard):
        if name in as_stored:
            yield from _parts(name, Grid(*grids[name][1]()))
        else:
            yield Stored(name, read, partial(_itself, shape))


def _parts(weight: str, grid: Grid) -> Iterator[Stored]:
    """The three parts of a grid, in place of its weight."""
    for name, tensor in grid._asdict().items():
        yield Stored(
            f"{weight.removesuffix('weight')}{name}", partial(_itself, tensor), tensor.size
        )


def _grouped(
    every: Sequence[Stored], scheme: Scheme
) -> tuple[dict[str, dict[str, Stored]], list[Stored]]:
    """The parts of each quantised weight, and the tensors that are none."""
    groups: dict[str, dict[str, Stored]] = {}
    rest = []
    for each in every:
        weight, part = scheme.split(each.name)
        if part in scheme.main:
            groups[weight] = {}
    for each in every:
        weight, part = scheme.split(each.name)
        if part in scheme.ignored:
            continue
        if part in scheme.parts and weight in groups:
            groups[weight][part] = each
        else:
            rest.append(each)
    return groups, rest


def _assembled(
    every: Sequence[Stored], scheme: Scheme, as_stored: Collection[str]
) -> Iterator[Stored]:
    """All tensors, with one weight, or its grid, in place of the parts that stand for it."""
    groups, rest = _grouped(every, scheme)
    yield from rest
    for weight, parts in groups.items():
        if weight in as_stored:
            assert isinstance(scheme, Grouped)
            yield from _parts(weight, _read(weight, parts, scheme, scheme.grid))
            continue
        whole = partial(_read, weight, parts, scheme, scheme.weight)
        yield Stored(weight, whole, partial(_shape, parts, scheme))


def _read(
    weight: str, parts: dict[str, Stored], scheme: Scheme, make: Callable[[dict[str, Tensor]], T]
) -> T:
    read = {part: each.read() for part, each in parts.items()}
    try:
        return make(read)
    except (KeyError, IndexError, RuntimeError) as error:
        shapes = ", ".join(f"{part} {list(tensor.shape)}" for part, tensor in read.items())
        raise CheckpointError(
            f"{weight}: these are no {scheme.name} weights ({shapes}): "
            f"{str(error).splitlines()[0][:200]}"
        ) from None


def _shape(parts: dict[str, Stored], scheme: Scheme) -> Sequence[int]:
    return scheme.shape({part: each.shape() for part, each in parts.items()})


def _pickled(shard: Path) -> dict[str, Tensor]:
    """The tensors of a file that ``torch.save`` wrote; nothing in it is executed."""
    try:
        state = torch.load(shard, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, UnpicklingError, EOFError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{shard} cannot be read: {reason}") from None
    if not isinstance(state, dict) or not all(isinstance(x, Tensor) for x in state.values()):
        raise CheckpointError(f"{shard} holds something else than tensors by name")
    return state


def _itself(value: T) -> T:
    return value
