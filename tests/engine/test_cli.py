"""The command line's flags: one definition of the engine's for every command."""

from collections.abc import Callable
from typing import Any

import pytest
import typer.main

from overlap_spec.cli import app
from overlap_spec.cli.flags import ENGINE_FLAGS, SERVER_FLAGS, SERVING_ENGINE_FLAGS
from overlap_spec.config import EngineConfig, helps
from overlap_spec.server.settings import ServerSettings


def flags(command: str) -> dict[str, tuple[Any, ...]]:
    group: Any = typer.main.get_command(app)
    return {p.name: (p.opts, p.default, p.help) for p in group.commands[command].params}


@pytest.mark.parametrize("name", ENGINE_FLAGS)
def test_commands_share_the_engines_flags(name: str) -> None:
    assert flags("generate")[name] == flags("serve")[name]
    assert flags("serve")[name][1] == getattr(EngineConfig, name)


def test_flags_are_fields_with_their_defaults() -> None:
    served = flags("serve")
    for settings, names in ((EngineConfig, SERVING_ENGINE_FLAGS), (ServerSettings, SERVER_FLAGS)):
        for name in names:
            default, text = getattr(settings, name), helps(settings)[name].text
            if default == ():
                default, text = [], f"{text} Repeat it."
            assert served[name][1:] == (default, text)
    assert served["trusted_proxies"][0] == ["--trusted-proxy"]
    assert served["num_steps"][0] == ["--num-steps", "--speculative-num-steps"]
    assert served["draft"][0] == ["--draft", "--speculative-draft-model-path"]
    assert served["model"][0] == ["--model", "--model-path"]
    assert served["max_total_tokens"][0] == ["--max-total-tokens"]
    assert served["mem_fraction_static"][0] == ["--mem-fraction", "--mem-fraction-static"]
    assert flags("doctor").keys() == {"model", "draft", "algorithm"}


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "batch"])
def test_every_flag_of_the_settings_has_a_panel_and_its_short_name_first(command: str) -> None:
    group: Any = typer.main.get_command(app)
    for param in group.commands[command].params:
        if param.name in ENGINE_FLAGS:
            assert param.rich_help_panel == ENGINE_FLAGS[param.name]
        assert param.opts[0] == min(param.opts, key=len), param.opts


def test_a_checkpoints_own_code_is_refused_with_the_reason(
    run: Callable[[str], tuple[int, str, str]],
) -> None:
    code, _, told = run("serve --trust-remote-code")
    assert code == 2
    assert "--trust-remote-code: no code from a checkpoint is ever run" in told
