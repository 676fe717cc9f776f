"""What llama-cpp-python's classes promise their callers, over random scores."""

from typing import Any

import numpy as np

CONTROL = ("<s>", "</s>", "<tool_call>")


class LogitsProcessorList(list[Any]):
    """Applies its processors in turn."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        for processor in self:
            scores = processor(input_ids, scores)
        return scores


class LlamaTokenizer:
    """The pieces of a file's tokens: a control token's are asked for by ``special``."""

    def detokenize(
        self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False
    ) -> bytes:
        assert prev_tokens is None
        shown = CONTROL if special else [""] * len(CONTROL)
        pieces = [*(text.encode() for text in shown), *(bytes([byte]) for byte in range(256))]
        return b"".join(pieces[token] for token in tokens)


class Llama:
    """A model of single bytes; its scores are random, and fall for letters in a row."""

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)

    def n_vocab(self) -> int:
        return len(CONTROL) + 256

    def token_eos(self) -> int:
        return CONTROL.index("</s>")

    def tokenizer(self) -> LlamaTokenizer:
        return LlamaTokenizer()

    def create_chat_completion(
        self, messages: list[Any], max_tokens: int, logits_processor: Any
    ) -> dict[str, Any]:
        ids = np.array([0, *(len(CONTROL) + byte for byte in str(messages).encode())], np.intc)
        start, logits = len(ids), np.empty(self.n_vocab(), np.single)
        while len(ids) < start + max_tokens:
            logits[:] = self._random.normal(size=len(logits))
            # What ends a text, so that one does.
            logits[[len(CONTROL) + byte for byte in b'"}]']] += 2
            logits[:] = logits_processor(ids, logits)
            token = int(logits.argmax())
            if token == self.token_eos():
                break
            ids = np.append(ids, np.intc(token))
        text = LlamaTokenizer().detokenize(ids[start:].tolist()).decode()
        return {"choices": [{"message": {"role": "assistant", "content": text}}]}


for kind in (Llama, LlamaTokenizer, LogitsProcessorList):
    kind.__module__ = "llama_cpp.llama"
