"""Peers that a run starts by itself: the files that llama.cpp reads, and their servers' life."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from bench.backends.base import Task
from bench.backends.gguf_file import write_gguf, write_gguf_head
from bench.backends.launched import Work, open_peers
from bench.padded import Source
from overlap_spec.config import EMBEDDED
from overlap_spec.models.config import read_config
from overlap_spec.models.eagle3 import feature_layers, read_eagle3_config
from tests.support.checkpoints import SHAPE, write_target


class Writer:
    """Stands for ``gguf.GGUFWriter``: keeps what it is given."""

    made: ClassVar[list[Writer]] = []

    def __init__(self, *_: Any) -> None:
        self.tensors: dict[str, tuple[Any, Any]] = {}
        self.fields: dict[str, Any] = {}
        self.arrays: dict[str, Any] = {}
        self.made.append(self)

    def add_tensor(self, name: str, data: Any, raw_dtype: Any = None) -> None:
        self.tensors[name] = (data, raw_dtype)

    def add_array(self, name: str, values: Any) -> None:
        self.arrays[name] = values

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.fields.__setitem__(name, given)


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> type[Writer]:
    kinds = SimpleNamespace(UNUSED="unused", NORMAL="normal", CONTROL="control")
    gguf = SimpleNamespace(
        GGUFWriter=Writer,
        TokenType=kinds,
        GGMLQuantizationType=SimpleNamespace(F32="f32", BF16="bf16", I64="i64"),
    )
    monkeypatch.setitem(sys.modules, "gguf", gguf)  # type: ignore[arg-type]
    monkeypatch.setattr(Writer, "made", [])
    return Writer


def test_a_file_has_every_weight_and_interleaved_heads(
    writer: type[Writer], tmp_path: Path
) -> None:
    write_target(tmp_path / "source", tie_word_embeddings=True)
    weights = Source(tmp_path / "source")
    write_gguf(tmp_path / "source", tmp_path / "out.gguf", torch.float32)
    (made,) = writer.made
    assert len(made.tensors) == len(weights.names)
    assert "output.weight" not in made.tensors
    heads, width = SHAPE["num_attention_heads"], SHAPE["hidden_size"] // 4
    ours = weights.get("model.layers.1.self_attn.q_proj.weight").numpy()
    theirs = made.tensors["blk.1.attn_q.weight"][0]
    for head in range(heads):
        for i in range(width // 2):
            for j in range(2):
                row = head * width + 2 * i + j
                np.testing.assert_array_equal(theirs[row], ours[head * width + j * width // 2 + i])
    value = made.tensors["blk.2.attn_v.weight"][0]
    wanted = weights.get("model.layers.2.self_attn.v_proj.weight").numpy()
    np.testing.assert_array_equal(value, wanted)
    assert made.fields["add_head_count_kv"] == (2,)
    (tokens,), (kinds,) = made.fields["add_token_list"], made.fields["add_token_types"]
    assert tokens[-4:] == ["<bos>", "<user>", "<assistant>", "<end>"]
    assert kinds[-4:] == ["control"] * 4
    assert made.fields["add_eos_token_id"] == (259,)


def test_a_head_names_its_features_and_tokens(writer: type[Writer], tmp_path: Path) -> None:
    source = EMBEDDED / "eagle3"
    write_gguf_head(source, EMBEDDED / "target", tmp_path / "head.gguf", torch.bfloat16)
    (made,) = writer.made
    config = read_eagle3_config(source)
    assert config.feature_layers is not None
    layers = list(feature_layers(config, read_config(EMBEDDED / "target")))
    assert made.arrays == {"eagle3.target_layers": layers}
    weights = Source(source)
    tokens, kind = made.tensors["d2t"]
    assert kind == "i64"
    # Distinct tokens of the target, that `t2d` has too.
    assert tokens.tolist() == weights.get("t2d").nonzero().flatten().tolist()
    # All but the two maps, and the second name of one of them.
    assert len(made.tensors) == len(weights.names) - 1
    assert made.tensors["blk.0.attn_q.weight"][1] == "bf16"


SERVER = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

if "-md" in sys.argv:
    sys.exit("this build has no drafts")

class Script(BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def do_GET(self):
        self.say(json.dumps({{"data": [{{"id": "m"}}]}}))
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["json_schema"] == {{"type": "integer"}} and "response_format" not in body
        done = {{"choices": [{{"text": str(sum(body["prompt"])), "finish_reason": "stop"}}],
                "usage": {{"completion_tokens": 2}}}}
        self.say(f"data: {{json.dumps(done)}}\\n\\ndata: [DONE]\\n\\n")
    def say(self, text):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Script).serve_forever()
"""


@pytest.mark.usefixtures("writer")
def test_a_peer_is_started_asked_and_ended(tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.write_text(SERVER.format(python=sys.executable), encoding="utf-8")
    program.chmod(0o755)
    given = {"llama-server": str(program)}
    work = Work(
        target=EMBEDDED / "target",
        head=EMBEDDED / "eagle3",
        dtype=torch.float32,
        encode=lambda task: [len(task.prompt), 4],
        parallel=1,
        context_tokens=64,
        threads=1,
        folder=tmp_path,
    )
    with ExitStack() as stack:
        systems, missing = open_peers(stack, given, ["vllm"], lambda: work)
        assert list(systems) == ["llama-server plain"]
        assert missing["llama-server EAGLE-3"].endswith("did not start: this build has no drafts")
        assert missing["vllm"] == "left out by --without"
        system = systems["llama-server plain"]
        (reply,) = system.run([Task("abc", {"type": "integer"}, 8)], 1).replies
        assert (reply.text, reply.tokens, reply.finish_reason) == ("7", 2, "stop")
        process = system.process
        assert process.poll() is None
    assert process.poll() is not None
