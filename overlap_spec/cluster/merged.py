"""Answers of all replicas to one request, as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.responses import Response

from overlap_spec.cluster.calls import Answer
from overlap_spec.server.admin import PROMETHEUS
from overlap_spec.server.errors import Json

Merge = Callable[[Sequence[Answer]], Response]
# A health of the whole besides those of one engine: some of the replicas are ready.
DEGRADED = "degraded"
# Of the totals of /requests, those that add up.
COUNTS = (
    *("open", "running", "waiting", "compiling", "max_running_requests", "output_tokens"),
    *("pages_in_use", "pages", "steps"),
)


def health(answers: Sequence[Answer]) -> Response:
    """Status 200 while any replica accepts requests; ``degraded`` if others do not."""
    told = {answer.replica: msgspec.json.decode(answer.body) for answer in answers}
    ready = sum(answer.status == 200 for answer in answers)
    status = "ready"
    if ready < len(answers) or not answers:
        first: str = next((each["status"] for each in told.values()), "starting")
        status = DEGRADED if ready else first
    restarts = sum(each["restarts"] for each in told.values())
    body = {"status": status, "restarts": restarts, "replicas": told}
    return Json(body, 200 if ready else 503)


def metrics(texts: Mapping[str, bytes]) -> Response:
    """Pages of ``/metrics``, by replica, as one, each sample with the label ``replica``."""
    registry = CollectorRegistry()
    registry.register(_Families(texts))
    return Response(generate_latest(registry), media_type=PROMETHEUS)


class _Families(Collector):
    def __init__(self, texts: Mapping[str, bytes]) -> None:
        self._texts = texts

    def collect(self) -> Iterable[Metric]:
        found: dict[str, Metric] = {}
        for replica, text in self._texts.items():
            for family in text_string_to_metric_families(text.decode()):
                whole = found.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    labels = {**sample.labels, "replica": replica}
                    whole.add_sample(sample.name, labels, sample.value)
        return found.values()


def summed(field: str) -> Merge:
    """Adds up a number; the first refusal is told instead."""

    def merge(answers: Sequence[Answer]) -> Response:
        bodies = [msgspec.json.decode(answer.body) for answer in answers]
        return Json({field: sum(body[field] for body in bodies)})

    return _unless_refused(merge)


def _info(answers: Sequence[Answer]) -> Response:
    first, bodies = _bodies(answers)
    # Settings are alike; what differs is each replica's state.
    whole = {"open_requests": sum(body["open_requests"] for body in bodies.values())}
    states = {name: body["state"] for name, body in bodies.items()}
    return Json({**first, **whole, "replicas": states})


def _timeline(answers: Sequence[Answer]) -> Response:
    return Json({"spans": _listed("spans", _bodies(answers)[1])})


def _requests(answers: Sequence[Answer]) -> Response:
    first, bodies = _bodies(answers)
    # What is no count is told as the first one has it.
    counts = {name: sum(body["totals"][name] for body in bodies.values()) for name in COUNTS}
    whole = {
        "totals": first["totals"] | counts,
        "requests": _listed("requests", bodies),
        "not_shown": sum(body["not_shown"] for body in bodies.values()),
    }
    return Json(first | whole)


def _bodies(answers: Sequence[Answer]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The first one's body, and all by replica."""
    bodies = {answer.replica: msgspec.json.decode(answer.body) for answer in answers}
    return next(iter(bodies.values())), bodies


def _listed(name: str, bodies: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**each, "replica": replica} for replica, body in bodies.items() for each in body[name]]


def _unless_refused(merge: Merge) -> Merge:
    def either(answers: Sequence[Answer]) -> Response:
        refused = next((answer for answer in answers if answer.status >= 400), None)
        return merge(answers) if refused is None else whole(refused)

    return either


def whole(answer: Answer) -> Response:
    """A replica's answer as a response."""
    response = Response(answer.body, answer.status)
    response.raw_headers = list(answer.headers)
    return response


# Method and path → how answers of all replicas become one, but for /metrics.
MERGES: dict[tuple[str, str], Merge] = {
    ("GET", "/health"): health,
    ("GET", "/ping"): health,
    ("GET", "/server_info"): _unless_refused(_info),
    ("GET", "/get_server_info"): _unless_refused(_info),
    ("GET", "/timeline"): _unless_refused(_timeline),
    ("GET", "/requests"): _unless_refused(_requests),
    ("POST", "/flush_cache"): summed("flushed_pages"),
    ("POST", "/abort_request"): summed("aborted"),
}
METRICS = ("GET", "/metrics")
