"""What `--model` and `--draft` take: a folder, a name of the hub, and hints for anything else."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from overlap_spec.config import EngineConfig
from overlap_spec.engine import Engine
from overlap_spec.errors import CheckpointError
from overlap_spec.grammar.tools.formats import guess_format, names
from overlap_spec.hub import find_folder, is_hub_name, wanted_files
from overlap_spec.server import launch

NAME, COMMIT = "some-org/tiny-model", "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub's files, and no network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    find_folder.cache_clear()
    return tmp_path / "hub"


def keep(cache: Path, name: str, folder: str) -> Path:
    """Put a folder's files into the cache as the hub's client does."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    made = repository / "snapshots" / COMMIT
    shutil.copytree(folder, made)
    return made


def test_a_hub_name_is_found_in_the_cache(tiny: dict[str, Any], cache: Path) -> None:
    target = keep(cache, NAME, tiny["model"])
    head = keep(cache, "some-org/head", tiny["draft"])
    config = EngineConfig.build(model=NAME, draft="some-org/head")
    assert (config.target_path, config.draft_path) == (target, head)
    with Engine(tiny["model"], grammar_isolated=False) as engine:
        want = engine.generate("hello", sampling={"max_tokens": 12})
    with Engine(NAME, draft="some-org/head", grammar_isolated=False) as engine:
        got = engine.generate("hello", sampling={"max_tokens": 12})
    assert got.token_ids == want.token_ids
    assert got.stats.drafted_tokens


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", None])
def test_what_is_not_whole_in_the_cache_says_how_to_get_it(
    tiny: dict[str, Any], cache: Path, missing: str | None
) -> None:
    if missing is not None:
        (keep(cache, NAME, tiny["model"]) / missing).unlink()
    for setting in ("model", "draft"):
        config = EngineConfig.build(**{setting: NAME})
        with pytest.raises(CheckpointError, match=f"run `hf download {NAME}`") as caught:
            _ = config.target_path, config.draft_path
        assert len(str(caught.value).splitlines()) == 1


def test_a_cached_index_needs_all_of_its_shards(tiny: dict[str, Any], cache: Path) -> None:
    folder = keep(cache, NAME, tiny["model"])
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="not whole"):
        find_folder(NAME)
    (folder / "model-2.safetensors").write_bytes(b"")
    assert find_folder(NAME) == folder


def test_a_file_and_a_missing_folder_are_hints(tiny: dict[str, Any], cache: Path) -> None:
    del cache
    weights = f"{tiny['model']}/model.safetensors"
    for given, words in {
        weights: f"is a file: give the folder that it is in, {tiny['model']}",
        "/no/such/folder": "/no/such/folder: no such folder; give the folder",
        "folder": "folder: no such folder; give the folder",
        "no/such": "no/such: no such folder here, and not whole in the Hugging Face cache",
    }.items():
        with pytest.raises(CheckpointError) as caught:
            find_folder(given)
        assert words in str(caught.value)
    Path("model.gguf").write_bytes(b"GGUF")
    # Where the package is not installed, the error says how to.
    with pytest.raises(CheckpointError, match=r"model\.gguf is (no whole|a) GGUF file"):
        find_folder("model.gguf")
    # A folder here comes first.
    Path("org/name").mkdir(parents=True)
    assert not is_hub_name("org/name")
    assert find_folder("org/name") == Path("org/name")


def test_of_two_kinds_of_weights_one_is_wanted() -> None:
    small = ["config.json", "tokenizer.json", "chat_template.jinja"]
    rest = [
        "README.md",
        "original/consolidated.00.pth",
        "onnx/model.safetensors",
        "tokenizer.model",
    ]
    shards = ["model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    old = ["pytorch_model.bin", "training_args.bin"]
    both = wanted_files([*small, *rest, *shards, *old, "consolidated.safetensors"])
    assert sorted(both) == sorted([*small, *shards])
    assert sorted(wanted_files([*small, *rest, *old])) == sorted([*small, "pytorch_model.bin"])


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as its client asks for to download a repository."""

    folder: Path

    def answer(self, body: bytes, kind: str, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "X-Repo-Commit": COMMIT,
            **headers,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        names = sorted(file.name for file in self.folder.iterdir())
        if path.startswith(f"/api/models/{NAME}/tree/"):
            listed = [
                {"type": "file", "path": n, "size": (self.folder / n).stat().st_size, "oid": n}
                for n in names
            ]
            self.answer(json.dumps(listed).encode(), "application/json", {})
        elif path.startswith(f"/api/models/{NAME}"):
            listed = [{"rfilename": name} for name in names]
            info = {"id": NAME, "modelId": NAME, "sha": COMMIT, "siblings": listed}
            self.answer(json.dumps(info).encode(), "application/json", {})
        elif path.startswith(f"/{NAME}/resolve/"):
            file = self.folder / path.rsplit("/", 1)[1]
            self.answer(file.read_bytes(), "application/octet-stream", {"ETag": f'"{file.name}"'})
        else:
            self.send_error(404)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def hub(tiny: dict[str, Any], tmp_path: Path) -> Iterator[str]:
    folder = tmp_path / "repository"
    shutil.copytree(tiny["model"], folder)
    (folder / "training_args.bin").write_bytes(b"not weights")
    handler = type("TinyHub", (Hub,), {"folder": folder})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_hub_name_is_downloaded_where_there_is_a_network(
    tiny: dict[str, Any], hub: str, tmp_path: Path
) -> None:
    """In a process of its own: the client reads its settings once."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
        "HF_HOME": str(tmp_path / "home"),
        "HF_ENDPOINT": hub,
        "HF_HUB_DISABLE_XET": "1",
    }
    code = f"from overlap_spec.hub import find_folder\nprint(find_folder({NAME!r}))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False, env=environment)
    assert done.returncode == 0, done.stderr.decode()
    folder = Path(done.stdout.decode().strip())
    assert not (folder / "training_args.bin").exists()
    got, want = (load_file(f / "model.safetensors") for f in (folder, Path(tiny["model"])))
    assert all(torch.equal(got[name], want[name]) for name in want)
    # What has been downloaded is asked of nobody.
    environment |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"}
    again = subprocess.run(command, capture_output=True, timeout=60, check=True, env=environment)
    assert again.stdout == done.stdout


def test_a_network_that_fails_is_one_line(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
        "HF_HOME": str(tmp_path),
        "HF_ENDPOINT": "http://127.0.0.1:9",
    }
    command = [sys.executable, "-m", "overlap_spec", "generate", "hi", "--model", NAME]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False, env=environment)
    assert done.returncode == 2
    (line,) = done.stderr.decode().splitlines()
    assert f"run `hf download {NAME}`" in line


# What the templates say of calls, in their own spelling, and the format.
TEMPLATES = {
    r"""{{- "\n</tools>\n\nreturn <tool_call></tool_call> XML tags:\n<tool_call>\n"""
    r"""{\"name\": <function-name>, \"arguments\": <arguments>}\n</tool_call>" }}""": "hermes",
    r"""{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument '"""
    """name and its value}.' }}""": "llama3_json",
    '{{- "[TOOL_CALLS] [" }}{{ tool_call.function|tojson }}': "mistral",
    '{{- "[TOOL_CALLS]" + name + "[ARGS]" + arguments }}': "mistral_v11",
    # Other models' calls between the same tags.
    r"""{{- "<tool_call>\n<function=" + tool_call.name + ">\n" }}""": None,
    "{% for m in messages %}{{ m.content }}{% endfor %}": None,
    "": None,
}


def test_the_format_of_tool_calls_is_guessed_from_the_template() -> None:
    for template, want in TEMPLATES.items():
        assert guess_format(template) == want, template
    assert set(TEMPLATES.values()) - {None} == set(names()) - {"embedded"}


def test_a_server_takes_the_guessed_format(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Any] = []
    monkeypatch.setattr(launch, "serve", lambda _engine, settings, _level: served.append(settings))
    template = next(text for text, name in TEMPLATES.items() if name == "hermes")
    folder = tmp_path / "model"
    shutil.copytree(tiny["model"], folder)
    flags: dict[str, Any] = {
        "chat_template": None,
        "stall_timeout_s": 9.0,
        "mask_deadline_ms": 0,
        "served_model_name": None,
        "tool_call_parser": None,
        "whitespace": "compact",
        "model": str(folder),
    }
    launch.launch(launch.plan(**flags), "info")
    (folder / "chat_template.jinja").write_text(template)
    launch.launch(launch.plan(**flags), "info")
    launch.launch(launch.plan(**{**flags, "tool_call_parser": "mistral"}), "info")
    launch.launch(launch.plan(**{**flags, "model": None}), "info")
    # A name of the hub is kept whole.
    find_folder.cache_clear()
    monkeypatch.setattr(launch, "find_folder", lambda _: folder)
    launch.launch(launch.plan(**{**flags, "model": NAME}), "info")
    parsers = [settings.tool_call_parser for settings in served]
    assert parsers == [None, "hermes", "mistral", "embedded", "hermes"]
    names = [settings.served_model_name for settings in served]
    assert names == ["model", "model", "model", "overlap-spec", NAME]
