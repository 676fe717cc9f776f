"""Laws of the code itself: who may import whom, and what the package exports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "overlap_spec"
BASE = {"types", "stats", "config", "errors"}
# Room → rooms that it may import, besides BASE. A module with a line of its own is its own room.
# Faces (cli, doctor, __main__) may import any.
MAY_IMPORT: dict[str, set[str]] = {
    "types": {"errors"},
    "stats": set(),
    "errors": set(),
    "config": {"errors"},
    "kernels": set(),
    "grammar": {"grammar"},
    "scheduler": {"scheduler"},
    "speculation": {"speculation"},
    "models": {"models", "kernels"},
    "drafters": {"drafters", "models", "kernels"},
    "worker": {"worker", "drafters", "models", "kernels"},
    "training": {"training", "drafters", "models", "kernels", "grammar", "tokenizer"},
    "tokenizer": {"grammar"},
    "timeline": set(),
    "engine.grammar_manager": {"grammar", "timeline"},
    "engine.drafter_guard": set(),
    "engine.core": {
        "scheduler",
        "speculation",
        "worker",
        "grammar",
        "engine.grammar_manager",
        "engine.drafter_guard",
        "timeline",
    },
    "engine.input_processor": {"grammar", "tokenizer"},
    "engine.request_handle": {"grammar", "engine.input_processor"},
    "engine.output_processor": {"scheduler", "grammar", "engine.request_handle"},
    "engine": {
        "engine.core",
        "scheduler",
        "grammar",
        "engine.grammar_manager",
        "engine.input_processor",
        "engine.output_processor",
        "engine.request_handle",
        "timeline",
        "tokenizer",
    },
    "ipc": {"engine", "engine.input_processor", "engine.request_handle", "grammar", "tokenizer"},
    "async_engine": {"ipc", "grammar", "engine.input_processor", "tokenizer"},
    "generator": {"engine", "async_engine", "grammar", "engine.input_processor"},
    "server": {"async_engine", "grammar", "engine.input_processor", "tokenizer"},
}
# Room → third-party modules that it may import; None: any that the project depends on.
MAY_USE: dict[str, set[str] | None] = {
    "types": {"numpy"},
    "stats": set(),
    "errors": set(),
    "config": set(),
    "kernels": {"torch", "triton"},
    "grammar": {"numpy", "pydantic", "jsonschema", "referencing", "typing_extensions"},
    "scheduler": {"numpy"},
    "speculation": {"numpy"},
    "models": {"torch", "safetensors"},
    "drafters": {"torch", "numpy"},
    "worker": {"torch", "numpy"},
    "training": None,
    "tokenizer": {"tokenizers", "jinja2"},
    "timeline": set(),
    "engine.grammar_manager": set(),
    "engine.core": set(),
    "engine.drafter_guard": set(),
    "engine.input_processor": set(),
    "engine.request_handle": set(),
    "engine.output_processor": set(),
    "engine": set(),
    "ipc": {"zmq", "msgspec"},
    "async_engine": set(),
    "generator": set(),
    "server": None,
}
FACES = {"__init__", "__main__", "cli", "doctor", "bench"}


def sources() -> list[Path]:
    rooms = [PACKAGE, ROOT / "grammar", ROOT / "kernels"]
    return [p for room in rooms for p in sorted(room.rglob("*.py")) if "__pycache__" not in p.parts]


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return room(parts[1:] if parts[0] == "overlap_spec" else parts)


def room(parts: Sequence[str]) -> str:
    """The longest of a module's parents, itself included, that is a room."""
    names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((name for name in names if name in MAY_IMPORT), parts[0] if parts else "")


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            if module == "overlap_spec":
                found |= {f"overlap_spec.{alias.name}" for alias in node.names}
            else:
                found.add(module)
    return found


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_import_law(path: Path) -> None:
    here = room_of(path)
    if here in FACES:
        return
    assert here in MAY_IMPORT, f"{here} is not in the import law"
    for name in imports(path):
        top, *rest = name.split(".")
        if top == "overlap_spec":
            assert room(rest) in MAY_IMPORT[here] | BASE | {here}, f"{path} imports {name}"
        elif top not in sys.stdlib_module_names:
            allowed = MAY_USE[here]
            own = {path.stem, f"{path.stem}_core"} if path.parent.name == "backends" else set()
            assert allowed is None or top in allowed | own, f"{path} uses {name}"


def test_no_bare_import_of_the_linked_folders() -> None:
    bare = re.compile(r"^\s*(?:import|from)\s+(?:grammar|kernels)\b", re.MULTILINE)
    for path in [*sources(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "bench").rglob("*.py")]:
        assert not bare.search(path.read_text()), path


def test_exported_names_load() -> None:
    import overlap_spec

    assert sorted(overlap_spec.__all__) == overlap_spec.__all__
    for name in overlap_spec.__all__:
        assert getattr(overlap_spec, name).__name__ == name
    with pytest.raises(AttributeError, match="Nonesuch"):
        _ = overlap_spec.Nonesuch


def test_import_is_lazy() -> None:
    code = (
        "import sys, overlap_spec, overlap_spec.grammar\n"
        "heavy = {'torch', 'xgrammar', 'transformers', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_servers_process_needs_no_model() -> None:
    code = "import sys, overlap_spec.server.run\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_links_are_committed_as_links() -> None:
    for name in ("grammar", "kernels"):
        assert (PACKAGE / name).is_symlink()
        assert (PACKAGE / name).readlink() == Path("..") / name
