"""How ``overlap-spec bench`` asks servers."""

from __future__ import annotations

from dataclasses import dataclass

from overlap_spec.config import setting
from overlap_spec.errors import ConfigError

WORKLOADS = ("json", "free", "mixed")
MODES = ("closed", "open", "both")


@dataclass(frozen=True)
class Load:
    """What servers are asked, and how."""

    workload: str = setting("json (under schemas), free (texts) or mixed.", "json")
    mode: str = setting("closed (a number of clients), open (random arrivals) or both.", "closed")
    clients: int = setting("Clients of the closed loop.", 8)
    rate: float = setting("Requests a second of the open loop.", 8.0)
    requests: int = setting("Requests of each loop.", 100)
    repetitions: int = setting("Turns of each server.", 1)
    max_tokens: int = setting("Most tokens of an answer.", 128)
    temperature: float = setting("0 is greedy.", 0.0)
    seed: int = setting("Of order and arrivals.", 0)

    def __post_init__(self) -> None:
        """Raises ConfigError that names the setting."""
        for name, known in (("workload", WORKLOADS), ("mode", MODES)):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"{name} must be one of {', '.join(known)}: {getattr(self, name)!r}"
                )
        for name in ("clients", "rate", "requests", "repetitions", "max_tokens"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be over 0: {getattr(self, name)}")

    @property
    def modes(self) -> tuple[str, ...]:
        """The loops, in order."""
        return ("closed", "open") if self.mode == "both" else (self.mode,)
