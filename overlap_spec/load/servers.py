"""What a server tells of itself: its model's name, and its figures."""

from __future__ import annotations

from typing import Any

import httpx

from overlap_spec.errors import ConfigError

ACCEPT_LENGTH = "overlap_spec:spec_accept_length"


def read_metrics(client: httpx.Client, url: str) -> dict[str, float]:
    """A server's Prometheus metrics without their labels, summed; empty where it has none."""
    reply = client.get(f"{url}/metrics")
    if reply.status_code != 200:
        return {}
    found: dict[str, float] = {}
    for line in reply.text.splitlines():
        name, _, text = line.rpartition(" ")
        if not line or line.startswith("#"):
            continue
        try:
            value = float(text)
        except ValueError:
            # A page of another kind.
            return {}
        bare = name.partition("{")[0]
        found[bare] = found.get(bare, 0.0) + value
    return found


def verifies_of(metrics: dict[str, float]) -> tuple[float, float] | None:
    """Tokens that verifies gave, and how many verifies; None of a server that does not say."""
    if f"{ACCEPT_LENGTH}_count" not in metrics:
        return None
    return metrics[f"{ACCEPT_LENGTH}_sum"], metrics[f"{ACCEPT_LENGTH}_count"]


def served_model(client: httpx.Client, url: str) -> str:
    """The first model that a server lists.

    Raises:
        ConfigError: it lists none.
    """
    reply = client.get(f"{url}/v1/models")
    try:
        data: list[dict[str, Any]] = reply.json()["data"] if reply.status_code == 200 else []
        return str(data[0]["id"])
    except (ValueError, LookupError, TypeError):
        raise ConfigError(f"{url}/v1/models lists no model: {reply.status_code}") from None
