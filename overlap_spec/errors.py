"""Every error that users of overlap-spec can meet.

OverlapSpecError
├── InvalidRequest          one request is at fault: bad field, schema or prompt (HTTP 400)
│   └── GrammarError        the constraint itself is at fault
├── CheckpointError         a checkpoint cannot be loaded as it is
├── ConfigError             an engine setting is wrong
├── EngineUnavailable       the engine, or a process of its, is closed, gone or not there (HTTP 503)
├── QueueFull               more requests wait than may wait (HTTP 429)
└── RequestFailed           a running request ended with an error; the engine goes on
    ├── GrammarFailed        its grammar went over a limit of the library that runs it
    └── NumericFault        its logits are not numbers, and its cache is not to be trusted
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


class OverlapSpecError(Exception):
    """Base of all errors raised on purpose; the message says what was wrong and what to do."""


class InvalidRequest(OverlapSpecError, ValueError):
    """A request that cannot be served as asked; ``param``: the field at fault (``"max_tokens"``,
    ``"schema"`` …), or None."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class GrammarError(InvalidRequest):
    """A constraint that is broken, unsupported, or that no backend reads exactly."""


class CheckpointError(OverlapSpecError):
    """A checkpoint with a missing, left-over or ill-shaped part; the message names it."""


class ConfigError(OverlapSpecError, ValueError):
    """An engine setting that is wrong, contradictory, or names what is not built."""


class EngineUnavailable(OverlapSpecError):
    """The engine is closed, or a process that a request needs is gone or not there yet; the message
    says which. No request is to blame."""


class QueueFull(OverlapSpecError):
    """More requests wait than may wait; try again later."""


class RequestFailed(OverlapSpecError):
    """One request ended with an error in the middle of its generation."""


class GrammarFailed(RequestFailed):
    """A grammar that compiled went over a limit of its library while it ran (HTTP 400)."""


class NumericFault(RequestFailed):
    """The model's logits for a request hold NaN."""

    def __init__(self, text: str = "the model's logits are not numbers: numeric fault") -> None:
        super().__init__(text)


def unknown(
    what: str, name: str, known: Iterable[str], elsewhere: Mapping[str, str] | None = None
) -> str:
    """A message for a name of ``what`` (``"setting"``) that does not exist; ``known`` ones do, for
    some of which others have the names ``elsewhere``."""
    names = sorted(known)
    alike = difflib.get_close_matches(name, names, 1)
    meant = (elsewhere or {}).get(name) or (alike[0] if alike else None)
    hint = f"did you mean {meant!r}? " if meant else ""
    return f"unknown {what} {name!r}; {hint}known: {', '.join(names)}"


def reason(error: OSError | UnicodeError) -> str:
    """Why a file cannot be read or written, in the system's words."""
    text = error.strerror if isinstance(error, OSError) else None
    return text[:1].lower() + text[1:] if text else str(error)
