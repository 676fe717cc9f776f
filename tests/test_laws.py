"""Laws of the code itself: who may import whom, and what the package exports."""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "overlap_spec"
BASE = {
    "types", "tiers", "steps", "stats", "config", "errors", "hub", "memory", "caches", "children",
    "shares", "gguf",
}  # fmt: skip


def table(text: str) -> dict[str, set[str]]:
    """Names by what stands before a colon; lines without one go on, those with a # say why."""
    lines = [line for line in text.splitlines() if not line.strip().startswith("#")]
    rows = re.findall(r"([\w.]+):([^:]*)(?=\s[\w.]+:|\Z)", "\n".join(lines))
    return {room: set(names.split()) for room, names in rows}


# Room → rooms that it may import, besides BASE. A module with a line of its own is its own room.
# Faces (cli, doctor, __main__) may import any.
MAY_IMPORT = table(
    """
    types: errors tiers
    tiers:
    steps: tiers types
    stats:
    errors:
    shares:
    caches:
    config: errors hub
    hub: errors gguf
    gguf: gguf errors caches
    memory:
    children: errors
    kernels:
    grammar: grammar
    scheduler: scheduler
    speculation: speculation
    models: models kernels
    # Of the models it knows how they are cut, of the kernels how a pass is traced.
    parallel: models kernels
    drafters: drafters models kernels
    worker: worker worker.extras drafters models kernels parallel
    # Optional parts: whoever runs them imports the contract alone.
    worker.extras: worker models kernels grammar
    training: training models tokenizer
    chat_messages:
    chat_template:
    tokenizer: grammar chat_template
    tensorrt_llm:
    timeline:
    engine.arguments: grammar
    engine.grammar_manager: grammar scheduler timeline
    engine.grammar_drafts: grammar scheduler tokenizer worker
    engine.budgets: engine.grammar_drafts scheduler speculation worker
    engine.core: engine.budgets scheduler speculation worker grammar engine.grammar_manager
        timeline
    engine.start_up: engine.core engine.grammar_drafts speculation worker
    engine.profile: engine.start_up speculation timeline worker
    engine.build: engine.budgets engine.core engine.grammar_drafts engine.start_up scheduler
        speculation worker grammar models timeline tokenizer
    engine.sequences: engine.input_processor scheduler grammar tokenizer worker.extras
    engine.input_processor: grammar tokenizer chat_messages chat_template engine.arguments
    engine.request_handle: grammar
    engine.output_processor: scheduler grammar engine.request_handle
    engine: engine.arguments engine.build scheduler grammar engine.grammar_manager
        engine.input_processor engine.output_processor engine.request_handle engine.sequences
        timeline
    ipc: engine engine.input_processor engine.request_handle grammar tokenizer
    async_engine: ipc grammar engine.arguments engine.input_processor tokenizer
    generator: engine async_engine grammar engine.arguments engine.input_processor
    server: async_engine grammar engine.arguments engine.input_processor tokenizer chat_messages
        chat_template
    load: grammar engine.arguments
    cluster: async_engine server
    """
)
# Room → third-party modules that it may import; *: any that the project depends on.
MAY_USE = table(
    """
    types: numpy
    tiers: numpy
    steps: numpy
    stats:
    errors:
    shares:
    config:
    hub: huggingface_hub
    gguf: gguf numpy torch
    memory:
    children:
    kernels: torch triton
    grammar: numpy pydantic jsonschema jsonschema_specifications msgspec referencing
        typing_extensions
    scheduler: numpy
    speculation: numpy msgspec
    models: torch safetensors
    parallel: torch
    drafters: torch numpy
    worker: torch numpy msgspec
    worker.extras: torch numpy
    training: *
    chat_messages:
    chat_template: jinja2
    tokenizer: tokenizers
    tensorrt_llm:
    timeline:
    engine.arguments:
    engine.grammar_manager:
    engine.grammar_drafts: numpy
    engine.core:
    engine.start_up:
    engine.input_processor:
    engine.request_handle:
    engine.output_processor:
    engine:
    ipc: zmq msgspec
    async_engine:
    generator:
    server: *
    load: httpx jsonschema prometheus_client
    cluster: ray msgspec prometheus_client pydantic starlette
    """
)
# Folders with one file a library → what a file of that name may import besides.
OWN: dict[str, Callable[[str], set[str]]] = {
    "backends": lambda name: {name, f"{name}_core"},
    "adapters": lambda name: {name, "torch"} if name == "transformers" else {name},
}
# What stands beside the package.
BESIDE = {"bench", "examples", "tests"}
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
            assert top not in BESIDE, f"{path} imports {name}, which no wheel has"
            allowed = MAY_USE[here]
            own = OWN.get(path.parent.name, lambda _: set())(path.stem)
            assert "*" in allowed or top in allowed | own, f"{path} uses {name}"


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
    # What `serve` runs before and in its front.
    code = (
        "import sys, overlap_spec.server.run, overlap_spec.server.launch\n"
        "from overlap_spec.config import EngineConfig\n"
        "from overlap_spec.doctor import check_files\n"
        "check_files(EngineConfig.build(), None)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_links_are_committed_as_links() -> None:
    for name in ("grammar", "kernels"):
        assert (PACKAGE / name).is_symlink()
        assert (PACKAGE / name).readlink() == Path("..") / name


# The rooms inside grammar/, from the bottom up → the rooms that each may import besides itself. A
# module with a line of its own is its own room.
GRAMMAR_MAY_IMPORT: dict[str, set[str]] = {
    "automata": set(),
    "ir": {"automata"},
    "ir.reach": {"automata", "ir"},
    "parsing": {"automata", "ir"},
    "schemas": {"automata"},
    "tools": {"automata", "schemas"},
    "reasoning": {"tools"},
    "spec": {"automata", "parsing", "schemas", "tools", "reasoning"},
    "distinct.text": {"schemas"},
    "distinct.plan": {"schemas", "lowering", "distinct.text"},
    "lowering": {
        "automata",
        "ir",
        "parsing",
        "schemas",
        "tools",
        "reasoning",
        "spec",
        "distinct.text",
        "distinct.plan",
    },
    "dialects": {"automata", "ir"},
    "rows": set(),
    "vocabularies": set(),
    "vocabulary": {"rows", "reasoning", "vocabularies"},
    "drafting.token_trie": set(),
    "drafting.state_table": {"drafting.token_trie"},
    "room": {"rows", "automata", "ir", "ir.reach", "vocabulary"},
    "contract": {"spec", "vocabulary", "drafting.state_table", "ir.reach", "room"},
    "drafting": {
        "automata",
        "ir",
        "spec",
        "lowering",
        "vocabulary",
        "contract",
        "drafting.state_table",
        "drafting.token_trie",
    },
    "matching": {"rows", "vocabulary", "contract", "drafting"},
    "adapters": {"contract", "matching"},
    "isolation.import_stubs": set(),
    "backends": {
        "rows",
        "automata",
        "ir",
        "ir.reach",
        "dialects",
        "parsing",
        "spec",
        "lowering",
        "vocabulary",
        "contract",
        "matching",
        "room",
        "isolation.import_stubs",
    },
    "isolation": {
        "schemas",
        "tools",
        "reasoning",
        "spec",
        "lowering",
        "vocabulary",
        "contract",
        "drafting",
        "drafting.state_table",
        "ir.reach",
        "room",
        "isolation.import_stubs",
    },
    "room.matcher": {"rows", "contract", "matching", "room"},
    "distinct": {"rows", "schemas", "vocabulary", "contract", "matching", "distinct.text"},
    "reasoning.matcher": {"rows", "reasoning", "reasoning.tables", "spec", "contract", "matching"},
    "reasoning.tables": {"reasoning", "vocabulary", "contract"},
    "compile": {
        "spec",
        "vocabulary",
        "contract",
        "drafting.state_table",
        "ir.reach",
        "room",
        "backends",
        "isolation",
        "distinct",
        "reasoning.matcher",
    },
    "__init__": {"spec", "vocabulary", "contract", "compile", "matching"},
}


def grammar_room(name: str) -> str:
    """The room of `compile`, `backends.auto` and the like: the longest of its parents that is one,
    itself included."""
    parts = name.split(".")
    names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((name for name in names if name in GRAMMAR_MAY_IMPORT), parts[0])


def test_the_root_of_the_grammars_has_what_users_import() -> None:
    found = {path.stem for path in (ROOT / "grammar").glob("*.py")}
    assert len(found) <= 10, f"grammar/ has {len(found)} files; its folders have room for more"
    assert found <= set(GRAMMAR_MAY_IMPORT)


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "overlap_spec" else ("overlap_spec", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules_used(path: Path, modules: dict[str, Path]) -> set[str]:
    """Modules of the package that a file imports anywhere in it, also for annotations alone.

    Importing a module runs the packages around it first, so these count too, but for those that
    the file is in itself.
    """
    me, found = module_of(path), set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else str(node.module) for name in names}
    for name in list(found):
        parts = name.split(".")
        around = {".".join(parts[:n]) for n in range(1, len(parts))}
        found |= {name for name in around if not f"{me}.".startswith(f"{name}.")}
    return {name for name in found if name in modules and name != me}


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules each of which imports the next, the last being the first again; empty if none do."""
    done = set[str]()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in done:
            for other in sorted(graph[name]):
                found = visit(other, [*path, name])
                if found:
                    return found
            done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := visit(name, []))), [])


def test_grammar_rooms() -> None:
    paths = {module_of(path): path for path in sources()}
    prefix = "overlap_spec.grammar."
    # A package whose own file imports nothing binds nobody.
    packages = {name for name, path in paths.items() if path.stem == "__init__"}
    bare = {name for name in packages if not modules_used(paths[name], paths)}
    for name, path in paths.items():
        if not f"{name}.".startswith(prefix):
            continue
        room = grammar_room(name.removeprefix(prefix) if name.startswith(prefix) else "__init__")
        assert room in GRAMMAR_MAY_IMPORT, f"{path} is not in GRAMMAR_MAY_IMPORT"
        for other in modules_used(path, paths):
            if other.startswith(prefix) and other not in bare:
                theirs = grammar_room(other.removeprefix(prefix))
                allowed = GRAMMAR_MAY_IMPORT[room] | {room}
                assert theirs in allowed, f"{name} ({room}) imports {other} ({theirs})"


def test_no_circles() -> None:
    paths = {module_of(path): path for path in sources()}
    graph = {name: set(modules_used(path, paths)) for name, path in paths.items()}
    found = circle(graph)
    assert not found, f"imports in a circle: {' → '.join(found)}"
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


# What other libraries name so, and have no other way to.
NOT_OURS = {
    "_asdict", "_attn_implementation", "_cdata", "_disable_current_modes", "_exit", "_fields",
    "_index_put_impl_", "_local_scalar_dense", "_patch_lang_tensor", "_pin_memory",
    "_python_cu", "_python_dispatch", "_replace", "_replica_queue_len_cache",
    "_repr_html_", "_schema", "_set_running_loop", "_sleep", "_socket", "_state", "_to_copy",
    "_use_count",
}  # fmt: skip
# What tests still reach into; it may only become less.
STILL_PRIVATE = {
    "cluster/test_router.py": {"_open"},
    "engine/test_async_engine.py": {"_receive"},
    "engine/test_prompt_logprobs.py": {"_score"},
    "examples/test_data.py": {"_frame", "_turn"},
    "proofs/test_capture.py": {"_within"},
    "proofs/test_races.py": {"_accepted"},
    "proofs/test_recordings.py": {"_known"},
    "server/test_life.py": {"_folder"},
    "worker/test_replay.py": {"_known"},
}


def test_tests_share_by_support_alone() -> None:
    """No test module imports another."""
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("tests."):
                names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
                assert not any(name.startswith("test_") for name in names), path


def test_tests_read_no_private_names() -> None:
    """Of the product's; what other libraries have is theirs."""
    tests = ROOT / "tests"
    found = {str(p.relative_to(tests)): private_names(p) - NOT_OURS for p in tests.rglob("*.py")}
    more = {path: names - STILL_PRIVATE.get(path, set()) for path, names in found.items()}
    assert {path: names for path, names in more.items() if names} == {}


def private_names(path: Path) -> set[str]:
    """Names with an underscore in front that a file reads of others than its own classes."""
    return {
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and re.match(r"_[a-z]", node.attr)
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        and not (isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()")
    }
