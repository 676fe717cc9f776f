"""``transformers``' own ``generate``, with the logits processor that xgrammar ships for it.

Greedy; prompts come as the same token ids as everybody else's, and a batch is padded on the left.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.backends.base import Batch, Reply, Task

Encode = Callable[[Task], list[int]]


class Watch:
    """A stopping criterion that stops nothing: it notes when each length was reached."""

    def __init__(self) -> None:
        self.times: list[tuple[int, float]] = []

    def __call__(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        self.times.append((input_ids.shape[1], time.perf_counter()))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def at(self, length: int) -> float:
        """When ``length`` tokens, the prompt's included, were there."""
        return next(when for reached, when in self.times if reached >= length)


class XGrammarSystem:
    """``generate`` with xgrammar's own logits processor, one of a batch; see
    :class:`bench.backends.base.System`.

    Args:
        path: Folder of the checkpoint.
        encode: Prompt tokens of a task.
        dtype, device: Of the model.
    """

    def __init__(
        self,
        path: Path,
        encode: Encode,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        import xgrammar as xgr
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()
        self.encode = encode
        self.tokenizer = AutoTokenizer.from_pretrained(str(path), padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype)
        self.model: Any = model.eval().to(device)
        eos = self.model.generation_config.eos_token_id
        self.eos_ids = set(eos if isinstance(eos, list) else [eos])
        pad = self.model.generation_config.pad_token_id
        self.pad_id: int = pad if pad is not None else next(iter(self.eos_ids))
        self.how = "transformers generate, xgrammar.contrib.hf.LogitsProcessor"
        size = self.model.config.vocab_size
        info = xgr.TokenizerInfo.from_huggingface(self.tokenizer, vocab_size=size)
        self.compiler = xgr.GrammarCompiler(info)
        self.compiled: dict[str, Any] = {}

    def compile_ms(self, schema: dict[str, Any]) -> float:
        """Time to the compiled grammar, which is kept."""
        start, text = time.perf_counter(), json.dumps(schema)
        if text not in self.compiled:
            self.compiled[text] = self.compiler.compile_json_schema(
                text, any_whitespace=False, separators=(",", ":")
            )
        return (time.perf_counter() - start) * 1e3

    def close(self) -> None:
        """Nothing is held but the model."""

    def run(self, tasks: Sequence[Task], parallel: int) -> Batch:
        """Batches of ``parallel``."""
        start, replies = time.perf_counter(), list[Reply]()
        for first in range(0, len(tasks), parallel):
            replies += self._batch(tasks[first : first + parallel])
        return Batch(time.perf_counter() - start, replies)

    def _batch(self, tasks: Sequence[Task]) -> list[Reply]:
        from transformers import LogitsProcessorList, StoppingCriteriaList
        from xgrammar.contrib.hf import LogitsProcessor

        start = time.perf_counter()
        prompts, watch = [self.encode(task) for task in tasks], Watch()
        longest = max(map(len, prompts))
        ids = torch.tensor([[self.pad_id] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        # One limit a batch, and no stop strings.
        (limit,) = {task.max_tokens for task in tasks}
        assert not any(task.stop for task in tasks)
        grammars = [self.compiled[json.dumps(task.schema)] for task in tasks]
        with torch.inference_mode():
            out = self.model.generate(
                ids.to(self.model.device),
                attention_mask=mask.to(self.model.device),
                max_new_tokens=limit,
                do_sample=False,
                logits_processor=LogitsProcessorList([LogitsProcessor(grammars)]),
                stopping_criteria=StoppingCriteriaList([watch]),
            )
        return [self._reply(row[longest:].tolist(), longest, watch, start) for row in out]

    def _reply(self, ids: list[int], prompt: int, watch: Watch, start: float) -> Reply:
        """A row's reply; it ends when its own last token was there, not when the batch does."""
        eos = self.eos_ids
        end = next((i + 1 for i, token in enumerate(ids) if token in eos), None)
        kept = ids[:end]
        text = self.tokenizer.decode(
            [token for token in kept if token not in eos], clean_up_tokenization_spaces=False
        )
        return Reply(
            text=text,
            tokens=len(kept),
            finish_reason="stop" if end is not None else "length",
            ttft_ms=(watch.at(prompt + 1) - start) * 1e3,
            end_to_end_ms=(watch.at(prompt + len(kept)) - start) * 1e3,
            token_ids=tuple(kept),
        )
