"""llama.cpp in this process, through the C functions that ``llama-cpp-python`` lends.

Its Python class takes one request at a time; the C functions decode several sequences in one call,
which is what llama.cpp's own server does. So does this: a request that ends makes room for the
next, whose prompt goes into the same call. A token is picked as that server picks it: the best one
if its grammar takes it, else the best of those that the grammar takes.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import numpy as np

from bench.backends.base import Batch, Reply, Task
from overlap_spec.errors import OverlapSpecError

MODULE = "llama_cpp"
CONTEXT_STEP = 256
TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class LlamaCppError(OverlapSpecError):
    """llama.cpp refused a file, a grammar or a batch."""


@cache
def library() -> tuple[Any, Any]:
    """The library's C functions, and what takes its log, which has to live as long as they do.

    Raises:
        ImportError: ``llama-cpp-python`` is not installed.
    """
    lib: Any = import_module(MODULE)
    quiet = lib.llama_log_callback(lambda *_: None)
    lib.llama_log_set(quiet, ctypes.c_void_p(0))
    lib.llama_backend_init()
    return lib, quiet


@dataclass
class Slot:
    """A request on its way: where it stands in the cache, its grammar, and what it has said."""

    number: int
    task: Task
    start: float
    fresh: list[int]
    grammar: Any
    position: int = 0
    said: list[int] = field(default_factory=list)
    first: float = 0.0


class LlamaCppSystem:
    """See :class:`bench.backends.base.System`.

    Args:
        path: GGUF file.
        encode, decode: Prompt tokens of a task, and the text of output tokens.
        parallel: Most requests at once.
        context_tokens: Longest prompt and output together.
        threads: For decoding and for prompts.

    Raises:
        ImportError: ``llama-cpp-python`` is not installed.
        LlamaCppError: it cannot load the file.
    """

    def __init__(
        self,
        path: Path,
        encode: Callable[[Task], list[int]],
        decode: Callable[[Sequence[int]], str],
        parallel: int,
        context_tokens: int,
        threads: int,
    ) -> None:
        self.lib, _ = library()
        self.to_gbnf: Any = import_module(f"{MODULE}.llama_grammar").json_schema_to_gbnf
        self.how = (
            f"llama.cpp in process (llama-cpp-python {metadata.version('llama-cpp-python')}), "
            f"{threads} threads, continuous batches, its own grammar of the JSON schema"
        )
        self.encode, self.decode = encode, decode
        self.parallel = parallel
        self.model = self.lib.llama_model_load_from_file(
            str(path).encode(), self.lib.llama_model_default_params()
        )
        if not self.model:
            raise LlamaCppError(f"llama.cpp cannot load {path.name}")
        self.vocab = self.lib.llama_model_get_vocab(self.model)
        length = -(-context_tokens // CONTEXT_STEP) * CONTEXT_STEP
        settings = self.lib.llama_context_default_params()
        settings.n_seq_max, settings.n_ctx = parallel, length * parallel
        # All prompts that start together go into one call.
        settings.n_batch = length * parallel
        settings.n_threads = settings.n_threads_batch = threads
        self.context = self.lib.llama_init_from_model(self.model, settings)
        if not self.context:
            raise LlamaCppError(f"llama.cpp cannot make a context of {settings.n_ctx} tokens")
        self.memory = self.lib.llama_get_memory(self.context)
        self.batch = self.lib.llama_batch_init(settings.n_batch, 0, 1)
        self.vocab_size: int = self.lib.llama_vocab_n_tokens(self.vocab)
        self.candidates = np.zeros(self.vocab_size, TOKEN_DATA)
        self.candidates["id"] = np.arange(self.vocab_size)
        self.compiled: dict[str, Any] = {}
        self.ends: list[int] = []

    def compile_ms(self, schema: dict[str, Any]) -> float:
        """Time to the compiled grammar, which is kept.

        Raises:
            LlamaCppError: llama.cpp does not take the schema.
        """
        start, text = time.perf_counter(), _text(schema)
        if text not in self.compiled:
            rules = self.to_gbnf(text).encode()
            made = self.lib.llama_sampler_init_grammar(self.vocab, rules, b"root")
            if not made:
                raise LlamaCppError(f"llama.cpp does not take the grammar of {text[:200]}")
            self.compiled[text] = made
        return (time.perf_counter() - start) * 1e3

    def run(self, tasks: Sequence[Task], parallel: int) -> Batch:
        """See :class:`bench.backends.base.System`. Grammars are compiled before."""
        if any(task.stop for task in tasks):
            raise NotImplementedError("llama.cpp in process: no stop strings")
        replies = [Reply() for _ in tasks]
        waiting, open_slots = deque(enumerate(tasks)), dict[int, Slot]()
        start = time.perf_counter()
        while waiting or open_slots:
            for place in range(min(parallel, self.parallel)):
                if waiting and place not in open_slots:
                    open_slots[place] = self._start(*waiting.popleft())
            self._decode(open_slots)
            for index, (place, slot) in enumerate(list(open_slots.items())):
                if self._push(slot, self._pick(index, slot.grammar)):
                    replies[slot.number] = self._reply(slot)
                    self._end(place, open_slots.pop(place))
        return Batch(time.perf_counter() - start, replies)

    def close(self) -> None:
        """See :class:`bench.backends.base.System`."""
        for grammar in self.compiled.values():
            self.lib.llama_sampler_free(grammar)
        self.compiled.clear()
        self.lib.llama_batch_free(self.batch)
        self.lib.llama_free(self.context)
        self.lib.llama_model_free(self.model)

    def _start(self, number: int, task: Task) -> Slot:
        start, grammar = time.perf_counter(), None
        if task.schema is not None:
            grammar = self.lib.llama_sampler_clone(self.compiled[_text(task.schema)])
        return Slot(number, task, start, self.encode(task), grammar)

    def _decode(self, open_slots: dict[int, Slot]) -> None:
        """One call: each slot's new tokens, and the logits of its last; ``_pick`` takes these in
        the slots' order."""
        batch, count = self.batch, 0
        self.ends = []
        for place, slot in open_slots.items():
            for token in slot.fresh:
                batch.token[count], batch.pos[count] = token, slot.position
                batch.n_seq_id[count], batch.seq_id[count][0] = 1, place
                batch.logits[count] = False
                slot.position += 1
                count += 1
            batch.logits[count - 1] = True
            self.ends.append(count - 1)
        batch.n_tokens = count
        if status := self.lib.llama_decode(self.context, batch):
            raise LlamaCppError(f"llama_decode of {count} tokens returned {status}")

    def _pick(self, index: int, grammar: Any) -> int:
        row = self.lib.llama_get_logits_ith(self.context, self.ends[index])
        logits = np.ctypeslib.as_array(row, (self.vocab_size,))
        token = int(logits.argmax())
        if grammar is None:
            return token
        best = np.array([(token, 1.0, 0.0)], TOKEN_DATA)
        self._apply(grammar, best)
        if best["logit"][0] == -np.inf:
            self.candidates["logit"] = logits
            self._apply(grammar, self.candidates)
            token = int(self.candidates["logit"].argmax())
        self.lib.llama_sampler_accept(grammar, token)
        return token

    def _apply(self, grammar: Any, candidates: np.ndarray[Any, Any]) -> None:
        data = candidates.ctypes.data_as(ctypes.POINTER(self.lib.llama_token_data))
        array = self.lib.llama_token_data_array(data, len(candidates), -1, False)
        self.lib.llama_sampler_apply(grammar, ctypes.byref(array))

    def _push(self, slot: Slot, token: int) -> bool:
        """Enter a token; whether it was the last."""
        if not slot.said:
            slot.first = time.perf_counter()
        slot.said.append(token)
        slot.fresh = [token]
        ended = bool(self.lib.llama_vocab_is_eog(self.vocab, token))
        return ended or len(slot.said) >= slot.task.max_tokens

    def _reply(self, slot: Slot) -> Reply:
        said = slot.said
        ended = bool(self.lib.llama_vocab_is_eog(self.vocab, said[-1]))
        return Reply(
            text=self.decode(said[:-1] if ended else said),
            tokens=len(said),
            finish_reason="stop" if ended else "length",
            ttft_ms=(slot.first - slot.start) * 1e3,
            end_to_end_ms=(time.perf_counter() - slot.start) * 1e3,
            token_ids=tuple(said),
        )

    def _end(self, place: int, slot: Slot) -> None:
        self.lib.llama_memory_seq_rm(self.memory, place, -1, -1)
        if slot.grammar is not None:
            self.lib.llama_sampler_free(slot.grammar)


def _text(schema: dict[str, Any]) -> str:
    # Properties keep their order: it is the order in which the grammar asks for them.
    return json.dumps(schema)
