"""What a server tells of itself: its model's name, and its figures."""

from __future__ import annotations

from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from overlap_spec.errors import ConfigError

ACCEPT_LENGTH = "overlap_spec:spec_accept_length"


def read_metrics(client: httpx.Client, url: str) -> dict[str, float]:
    """A server's Prometheus metrics without their labels, summed; empty where it has none."""
    reply = client.get(f"{url}/metrics")
    if reply.status_code != 200:
        return {}
    found = dict[str, float]()
    try:
        for family in text_string_to_metric_families(reply.text):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    except ValueError:
        # A page of another kind.
        return {}
    return found


def verifies_of(metrics: dict[str, float]) -> tuple[float, float] | None:
    """Tokens that verifies gave, and how many verifies; None of a server that does not say."""
    if f"{ACCEPT_LENGTH}_count" not in metrics:
        return None
    return metrics[f"{ACCEPT_LENGTH}_sum"], metrics[f"{ACCEPT_LENGTH}_count"]


def served_model(client: httpx.Client, url: str) -> str:
    """The first model that a server lists; ConfigError if it lists none."""
    reply = client.get(f"{url}/v1/models")
    try:
        data: list[dict[str, Any]] = reply.json()["data"] if reply.status_code == 200 else []
        return str(data[0]["id"])
    except (ValueError, LookupError, TypeError):
        raise ConfigError(f"{url}/v1/models lists no model: {reply.status_code}") from None
