"""A checkpoint's tokenizer, chat template, stop tokens and generation defaults."""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from overlap_spec.chat_template import ChatTemplate, Rendering
from overlap_spec.errors import CheckpointError, InvalidRequest
from overlap_spec.grammar.vocabulary import Vocabulary
from overlap_spec.types import SamplingParams

Message = Mapping[str, Any]
# Enough for the opening and closing marks of thinking, even with one token a character.
ENDING_TOKENS = 32
LONGEST_MESSAGE = 500


class Tokenizer:
    """A checkpoint's tokenizer and the files beside it that a request needs.

    Args:
        path: Folder with ``tokenizer.json`` and its config files.
        vocab_size: Size of the model's head, which may be larger than the tokenizer.
        chat_template: Jinja text to use instead of the checkpoint's.

    Raises:
        CheckpointError: a missing or broken file.
    """

    def __init__(self, path: Path, vocab_size: int, chat_template: str | None = None) -> None:
        from tokenizers import Tokenizer as Fast

        file = path / "tokenizer.json"
        if not file.exists():
            raise CheckpointError(f"{file} is missing")
        try:
            self._fast = Fast.from_file(str(file))
        except Exception as error:
            message = f"{file} is not a readable tokenizer.json: {error}"[:LONGEST_MESSAGE]
            raise CheckpointError(message) from None
        self._settings = _optional_json(path / "tokenizer_config.json")
        self._generation = _optional_json(path / "generation_config.json")
        if chat_template is None:
            chat_template = read_template(path)
        self._template: ChatTemplate | None = None
        if chat_template is not None:
            self._template = ChatTemplate(chat_template, self._special_tokens())
        self.eos_ids = self._read_eos(path, vocab_size)
        try:
            self.vocabulary = Vocabulary.from_tokenizer_json(file, vocab_size, sorted(self.eos_ids))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            message = f"{file}: {type(error).__name__}: {error}"[:LONGEST_MESSAGE]
            raise CheckpointError(message) from None
        self.vocab_size = vocab_size
        try:
            self.sampling_defaults(SamplingParams())
        except (InvalidRequest, TypeError) as error:
            raise CheckpointError(f"{path / 'generation_config.json'}: {error}") from None

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Token ids of ``text``; ``special`` adds the tokenizer's special tokens, such as BOS."""
        # `encode` keeps the interpreter's lock, and a megabyte takes seconds.
        (encoding,) = self._fast.encode_batch_fast([text], add_special_tokens=special)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids`` without special tokens; broken UTF-8 becomes U+FFFD."""
        pieces = self.vocabulary.text
        return b"".join(pieces[i] for i in ids).decode("utf-8", errors="replace")

    def ending(self, ids: Sequence[int]) -> str:
        """Text of a prompt's last tokens, special tokens included."""
        text: str = self._fast.decode(list(ids[-ENDING_TOKENS:]), skip_special_tokens=False)
        return text

    @property
    def switches(self) -> frozenset[str]:
        """Variables that the chat template reads besides the chat's own."""
        return frozenset() if self._template is None else self._template.switches

    def unread(self, variables: Mapping[str, Any]) -> list[str]:
        """The variables that the chat template does not read."""
        return [name for name in variables if name not in self.switches]

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        rendering: Rendering = Rendering(),  # noqa: B008, frozen
    ) -> list[int]:
        """Token ids of a chat in the model's template. InvalidRequest: there is none, or it rejects
        these messages."""
        return self.encode(self._render(messages, tools, rendering))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        open_answer: bool = True,
    ) -> str:
        """Text of a chat, as for :meth:`chat`; ``open_answer`` adds the start of an answer."""
        return self._render(messages, tools, Rendering(open_answer))

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, rendering: Rendering
    ) -> str:
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template: pass raw=True and a text prompt", "messages"
            )
        return self._template.render(messages, tools, rendering)

    def detokenizer(self) -> StreamDecoder:
        """A fresh decoder for one output."""
        return StreamDecoder(self.vocabulary.text)

    def sampling_defaults(self, params: SamplingParams) -> SamplingParams:
        """``params`` with unset fields filled in from ``generation_config.json``."""
        given = self._generation
        if given.get("do_sample") is False:
            given = given | {"temperature": 0.0}
        names = ("temperature", "top_k", "top_p", "repetition_penalty")
        unset = [n for n in names if getattr(params, n) is None and given.get(n) is not None]
        return replace(params, **{name: given[name] for name in unset})

    def _special_tokens(self) -> dict[str, str]:
        found = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            token = self._settings.get(name)
            if isinstance(token, dict):
                token = token.get("content")
            if token is not None and not isinstance(token, str):
                raise CheckpointError(f"tokenizer_config.json: {name} must be text: {token!r}")
            if token is not None:
                found[name] = token
        return found

    def _read_eos(self, path: Path, vocab_size: int) -> frozenset[int]:
        ids: set[int] = set()
        for source in (self._generation, _optional_json(path / "config.json")):
            value = source.get("eos_token_id")
            if value is not None:
                ids.update(value if isinstance(value, list) else [value])
                break
        token = self._special_tokens().get("eos_token")
        if token is not None and (number := self._fast.token_to_id(token)) is not None:
            ids.add(number)
        if not ids:
            raise CheckpointError(f"{path}: no eos_token_id in generation_config or config.json")
        for each in ids:
            if isinstance(each, bool) or not isinstance(each, int) or not 0 <= each < vocab_size:
                raise CheckpointError(
                    f"{path}: eos_token_id must be below the vocabulary of {vocab_size}: {each!r}"
                )
        return frozenset(ids)


class StreamDecoder:
    """Decodes the tokens of one output as they come; see ``scheduler.stops.Detokenizer``."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, tokens: Sequence[int]) -> str:
        return self._decoder.decode(b"".join([self._pieces[token] for token in tokens]))


def read_template(path: Path) -> Any:
    """The chat template of the checkpoint in folder ``path`` as its files have it, or None.
    CheckpointError: a file that cannot be read."""
    file = path / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text()
        except (OSError, UnicodeError) as error:
            raise CheckpointError(f"{file} is not readable text: {error}") from None
    template = _optional_json(path / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template


def _optional_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        data: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return data
