"""Settings of a cluster, and what is told where Ray is not installed."""

import sys
from pathlib import Path
from typing import Any

import pytest

from overlap_spec.cli import app as commands
from overlap_spec.cluster import app
from overlap_spec.cluster.arguments import read_arguments
from overlap_spec.cluster.launch import check_room
from overlap_spec.cluster.settings import ClusterSettings, gpus_of
from overlap_spec.config import EngineConfig
from overlap_spec.errors import ConfigError


def test_arguments_are_values_or_text(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[-1].content }}")
    plan, cluster = read_arguments(
        {
            "replicas": "3",
            "max_replicas": 5,
            "routing": "load",
            "max_running_requests": "4",
            "max_total_tokens": "none",
            "prefix_cache": "false",
            "whitespace": "2",
            "api_key": "secret",
            "cors_origins": ["http://page.example"],
            "chat_template": str(template),
            "request_timeout_s": 9,
        }
    )
    assert (cluster.replicas, cluster.max_replicas, cluster.routing) == (3, 5, "load")
    assert (plan.config.max_running_requests, plan.config.prefix_cache) == (4, False)
    assert plan.config.max_total_tokens is None
    assert plan.settings.whitespace == 2
    assert plan.settings.cors_origins == ("http://page.example",)
    assert plan.settings.request_timeout_s == 9.0
    assert plan.settings.served_model_name == "overlap-spec"
    assert plan.settings.tool_call_parser == "embedded"
    assert plan.engine["chat_template"] == "{{ messages[-1].content }}"
    # Ray Serve listens: what address a client calls it by is not known here.
    assert plan.settings.host == "0.0.0.0"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"replica": 2}, "unknown argument 'replica'; did you mean 'replicas'"),
        ({"max_running_requests": "many"}, "max_running_requests: 'many'"),
        ({"replicas": 0}, "replicas must be at least 1"),
        ({"replicas": 3, "max_replicas": 2}, "max_replicas must be at least replicas, 3"),
        ({"routing": "random"}, "routing must be one of prefix, load, round-robin"),
        ({"port": 1}, "port is not the application's"),
        ({"ray_address": "auto"}, "ray_address is not the application's"),
        ({"chat_template": "/nonesuch.jinja"}, "chat_template /nonesuch.jinja"),
        ({"dtype": "float8"}, "dtype"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_arguments(arguments)[0].config.check()
    assert says in str(raised.value)


def test_settings_of_replicas_need_replicas() -> None:
    ClusterSettings()
    for name, value in (("max_replicas", 2), ("routing", "load"), ("ray_address", "auto")):
        with pytest.raises(ConfigError, match=f"{name} goes with replicas"):
            ClusterSettings(**{name: value})


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ray", "ray.serve"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'overlap-spec\[cluster\]'"):
        app({"replicas": 2})
    with pytest.raises(ConfigError, match=r"pip install 'overlap-spec\[cluster\]'"):
        commands(["serve", "--replicas", "2"], standalone_mode=False)


@pytest.mark.parametrize("flag", ["--max-connections=5", "--header-timeout-s=2"])
def test_bounds_that_ray_serve_does_not_keep_are_refused(
    monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    monkeypatch.setattr("overlap_spec.cluster.launch.require_ray", lambda: None)
    with pytest.raises(ConfigError, match="bound of the server without replicas"):
        commands(["serve", "--replicas", "2", flag], standalone_mode=False)


def test_a_replica_takes_a_gpu_for_each_rank() -> None:
    cluster, ranks = ClusterSettings(replicas=2), EngineConfig(tensor_parallel_size=4)
    assert gpus_of(ranks, cluster, 8.0) == 4.0
    assert gpus_of(EngineConfig(), cluster, 8.0) == 1.0
    assert gpus_of(ranks, cluster, 0.0) == 0.0
    assert gpus_of(EngineConfig(device="cpu", tensor_parallel_size=4), cluster, 8.0) == 0.0
    assert gpus_of(ranks, ClusterSettings(replicas=2, gpus_per_replica=0.5), 8.0) == 0.5


def test_replicas_that_would_wait_for_ever_are_refused() -> None:
    cluster, ranks = ClusterSettings(replicas=2), EngineConfig(tensor_parallel_size=4)
    check_room(ranks, cluster, {"CPU": 2.0, "GPU": 8.0})
    check_room(ranks, cluster, {"CPU": 2.0})
    with pytest.raises(ConfigError, match="2 with 4 GPU each need 8, and there are 6: lower gpus"):
        check_room(ranks, cluster, {"CPU": 2.0, "GPU": 6.0})
    with pytest.raises(ConfigError, match="2 with 1 CPU each need 2, and there are 1"):
        check_room(ranks, cluster, {"CPU": 1.0})
