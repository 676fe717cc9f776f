"""llama.cpp as a peer: the file that it reads, and its answers on the same checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from bench.backends.base import Task
from bench.backends.engine import EngineSystem
from bench.backends.gguf_file import write_gguf
from bench.backends.llamacpp import LlamaCppError, LlamaCppSystem
from bench.padding.tensors import Source
from examples.embedded_model.data import held_out_cases
from overlap_spec.config import EMBEDDED
from overlap_spec.engine import Engine
from overlap_spec.errors import CheckpointError
from tests.support.checkpoints import SHAPE, write_target


class Writer:
    """Stands for ``gguf.GGUFWriter``: keeps what it is given."""

    made: ClassVar[list[Writer]] = []

    def __init__(self, *_: Any) -> None:
        self.tensors: dict[str, tuple[Any, Any]] = {}
        self.fields: dict[str, Any] = {}
        self.made.append(self)

    def add_tensor(self, name: str, data: Any, raw_dtype: Any = None) -> None:
        self.tensors[name] = (data, raw_dtype)

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.fields.__setitem__(name, given)


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> type[Writer]:
    kinds = SimpleNamespace(UNUSED="unused", NORMAL="normal", CONTROL="control")
    gguf = SimpleNamespace(
        GGUFWriter=Writer,
        TokenType=kinds,
        GGMLQuantizationType=SimpleNamespace(F32="f32", BF16="bf16"),
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


def test_matrices_keep_their_bits_in_bfloat16(writer: type[Writer], tmp_path: Path) -> None:
    write_target(tmp_path / "source")
    write_gguf(tmp_path / "source", tmp_path / "out.gguf", torch.bfloat16)
    (made,) = writer.made
    raw, kind = made.tensors["output.weight"]
    wanted = Source(tmp_path / "source").get("lm_head.weight").bfloat16()
    assert kind == "bf16"
    assert torch.equal(torch.from_numpy(raw).view(torch.bfloat16), wanted)
    norm, kind = made.tensors["output_norm.weight"]
    assert (norm.dtype, kind) == (np.float32, None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention_bias": True}, "biases"),
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, "norms.*Qwen3"),
    ],
)
def test_what_is_not_converted_is_said(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    write_target(tmp_path / "source", **changes)
    with pytest.raises(CheckpointError, match=reason):
        write_gguf(tmp_path / "source", tmp_path / "out.gguf", torch.float32)
    write_target(tmp_path / "plain")
    with pytest.raises(CheckpointError, match="float16"):
        write_gguf(tmp_path / "plain", tmp_path / "out.gguf", torch.float16)


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """The engine without drafts, and llama.cpp with two places."""
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    path = tmp_path_factory.mktemp("gguf") / "embedded.gguf"
    write_gguf(EMBEDDED / "target", path, torch.float32)
    with Engine(algorithm="none", max_running_requests=4) as engine:

        def encode(task: Task) -> list[int]:
            return list(engine.input_processor.prompt_ids(task.prompt, task.raw))

        system = LlamaCppSystem(path, encode, engine.tokenizer.decode, 2, 400, 1)
        yield EngineSystem(engine, "ours"), system
        system.close()


def test_llama_cpp_says_the_same_in_any_batch(sides: tuple[Any, Any]) -> None:
    ours, theirs = sides
    tasks = [Task(c.prompt, c.schema, 40) for c in held_out_cases(3, 5)]
    tasks.append(Task("Repeat: the ferry leaves at 07:45.", None, 12))
    for task in tasks[:-1]:
        assert task.schema is not None
        assert theirs.compile_ms(task.schema) > 0
    alone, together = theirs.run(tasks, 1).replies, theirs.run(tasks, 2).replies
    wanted = ours.run(tasks, 4).replies
    assert [r.token_ids for r in alone] == [r.token_ids for r in together]
    assert [r.text for r in alone] == [r.text for r in wanted]
    assert [r.finish_reason for r in alone] == [r.finish_reason for r in wanted]
    assert all(0 < r.ttft_ms <= r.end_to_end_ms for r in alone)


def test_llama_cpp_says_what_it_does_not_take(sides: tuple[Any, Any]) -> None:
    _, theirs = sides
    with pytest.raises(NotImplementedError, match="stop strings"):
        theirs.run([Task("x", stop=("y",))], 1)
    with pytest.raises(LlamaCppError, match="cannot load"):
        LlamaCppSystem(Path("none.gguf"), lambda _: [], str, 1, 10, 1)
