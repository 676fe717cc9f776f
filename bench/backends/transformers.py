"""``transformers``' own ``generate``, with the logits processors that its users put into it.

One checkpoint and one tokenizer for all of them, float32, greedy. Prompts come as the same token
ids as everybody else's; a batch is padded on the left. A processor of another library than
``transformers`` is taken as that library ships it, where it can do the work; what this file adds
is said in each system's ``how``.
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
LOOKUP_TOKENS = 5


class Checkpoint:
    """A model in ``transformers``, shared by its systems.

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
    :class:`bench.backends.base.System`."""

    batches = True
    # Prompts are padded to multiples of this, in tokens.
    pad_to = 1

    def __init__(self, checkpoint: Checkpoint) -> None:
        import xgrammar as xgr

        self.checkpoint = checkpoint
        self.how = "transformers generate, xgrammar.contrib.hf.LogitsProcessor"
        size = checkpoint.model.config.vocab_size
        info = xgr.TokenizerInfo.from_huggingface(checkpoint.tokenizer, vocab_size=size)
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

    def processors(self, tasks: Sequence[Task]) -> list[Any]:
        """Logits processors of one batch."""
        from xgrammar.contrib.hf import LogitsProcessor

        return [LogitsProcessor([self.compiled[json.dumps(task.schema)] for task in tasks])]

    def options(self) -> dict[str, Any]:
        """More arguments of ``generate``."""
        return {}

    def close(self) -> None:
        """Nothing is held but the shared checkpoint."""

    def run(self, tasks: Sequence[Task], parallel: int) -> Batch:
        """Batches of ``parallel``, or one task after another where the system takes no batch: then
        the later ones of those that were handed over together wait, and their times say so."""
        start, replies = time.perf_counter(), list[Reply]()
        size = parallel if self.batches else 1
        for first in range(0, len(tasks), parallel):
            together, handed = tasks[first : first + parallel], time.perf_counter()
            for each in range(0, len(together), size):
                replies += self._batch(together[each : each + size], handed)
        return Batch(time.perf_counter() - start, replies)

    def _batch(self, tasks: Sequence[Task], start: float) -> list[Reply]:
        from transformers import LogitsProcessorList, StoppingCriteriaList

        prompts, watch = [self.checkpoint.encode(task) for task in tasks], Watch()
        longest = -(-max(map(len, prompts)) // self.pad_to) * self.pad_to
        pad = self.checkpoint.pad_id
        ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        # One limit a batch, and no stop strings.
        (limit,) = {task.max_tokens for task in tasks}
        assert not any(task.stop for task in tasks)
        with torch.inference_mode():
            model = self.checkpoint.model
            out = model.generate(
                ids.to(model.device),
                attention_mask=mask.to(model.device),
                max_new_tokens=limit,
                do_sample=False,
                logits_processor=LogitsProcessorList(self.processors(tasks)),
                stopping_criteria=StoppingCriteriaList([watch]),
                **self.options(),
            )
        return [self._reply(row[longest:].tolist(), longest, watch, start) for row in out]

    def _reply(self, ids: list[int], prompt: int, watch: Watch, start: float) -> Reply:
        """A row's reply; it ends when its own last token was there, not when the batch does."""
        eos = self.checkpoint.eos_ids
        end = next((i + 1 for i, token in enumerate(ids) if token in eos), None)
        kept = ids[:end]
        text = self.checkpoint.tokenizer.decode(
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


class StaticSystem(XGrammarSystem):
    """With a cache of fixed size, for which ``generate`` compiles the model's step on a GPU.

    Prompts are padded so that their lengths are few: each one is compiled for anew.
    """

    pad_to = 128

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.how += (
            f", cache_implementation='static' (the step compiled on a GPU), prompts padded to "
            f"multiples of {self.pad_to} tokens"
        )

    def options(self) -> dict[str, Any]:
        """See :class:`XGrammarSystem`."""
        return {"cache_implementation": "static"}


class AssistedSystem(XGrammarSystem):
    """Prompt-lookup decoding, which drafts by n-grams of the prompt, one request at a time."""

    batches = False

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.how = (
            f"transformers assisted generation, prompt lookup of {LOOKUP_TOKENS} tokens, xgrammar "
            "matchers through a processor of ours that rolls back rejected drafts (xgrammar's "
            "own cannot); takes one request at a time"
        )

    def options(self) -> dict[str, Any]:
        """See :class:`XGrammarSystem`."""
        return {"prompt_lookup_num_tokens": LOOKUP_TOKENS}

    def processors(self, tasks: Sequence[Task]) -> list[Any]:
        """See :class:`XGrammarSystem`."""
        (task,) = tasks
        compiled = self.compiled[json.dumps(task.schema)]
        return [Resynchronised(compiled, len(self.checkpoint.encode(task)))]


class Resynchronised:
    """A logits processor that follows drafts: it takes its matcher to whatever text it is asked
    about, back and forth. A text that the grammar forbids gets no mask: it is never accepted.

    Args:
        compiled: xgrammar's compiled grammar.
        prompt_tokens: Tokens before the output.
    """

    def __init__(self, compiled: Any, prompt_tokens: int) -> None:
        import xgrammar as xgr

        self.matcher = xgr.GrammarMatcher(compiled)
        self.row = xgr.allocate_token_bitmask(1, compiled.tokenizer_info.vocab_size)
        self.apply = xgr.apply_token_bitmask_inplace
        self.prompt_tokens = prompt_tokens
        self.said: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        wanted = input_ids[0, self.prompt_tokens :].tolist()
        pairs = zip(self.said, wanted, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if same is None:
            same = min(len(self.said), len(wanted))
        if len(self.said) > same:
            self.matcher.rollback(len(self.said) - same)
            del self.said[same:]
        for token in wanted[same:]:
            if self.matcher.is_terminated() or not self.matcher.accept_token(token):
                return scores
            self.said.append(token)
        if not self.matcher.is_terminated():
            self.matcher.fill_next_token_bitmask(self.row)
            self.apply(scores, self.row)
        return scores
