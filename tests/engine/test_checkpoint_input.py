"""Checkpoints are input: what is wrong in one ends in one line that names it, and soon."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overlap_spec import chat_template
from overlap_spec.chat_template import ChatTemplate
from overlap_spec.config import EngineConfig
from overlap_spec.doctor import check_files
from overlap_spec.errors import CheckpointError, InvalidRequest
from overlap_spec.tokenizer import Tokenizer
from tests.support.checkpoints import rewrite

HI = [{"role": "user", "content": "hello"}]


@pytest.fixture
def folder(tiny: dict[str, Any], tmp_path: Path) -> Path:
    made = tmp_path / "target"
    shutil.copytree(tiny["model"], made)
    return made


def change(name: str, **fields: Any) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder / name, **fields)


def write(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


CONFIG, TOKENIZER, GENERATION = "config.json", "tokenizer.json", "generation_config.json"
WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "hidden_size": (change(CONFIG, hidden_size=10**9), "hidden_size"),
    "layers": (change(CONFIG, num_hidden_layers=10**8), "num_hidden_layers"),
    "vocab_size": (change(CONFIG, vocab_size=-5), "vocab_size"),
    "no vocab_size": (change(CONFIG, vocab_size=None), "vocab_size"),
    "text": (change(CONFIG, intermediate_size="big"), "intermediate_size"),
    "true": (change(CONFIG, num_attention_heads=True), "num_attention_heads"),
    "heads": (change(CONFIG, num_key_value_heads=3), "num_key_value_heads"),
    "eps": (change(CONFIG, rms_norm_eps=-1), "rms_norm_eps"),
    "theta": (change(CONFIG, rope_theta="x"), "rope_theta"),
    "scaling": (change(CONFIG, rope_scaling=[1]), "rope_scaling"),
    "factor": (change(CONFIG, rope_scaling={"type": "linear", "factor": "x"}), "rope_scaling"),
    "position": (change(CONFIG, max_position_embeddings=10**12), "max_position_embeddings"),
    "architectures": (change(CONFIG, architectures=7), "architectures"),
    "binary config": (write(CONFIG, b"\xff\xfe\x00"), "config.json"),
    "deep config": (write(CONFIG, b"[" * 10**5), "config.json"),
    "garbage tokenizer": (write(TOKENIZER, b"\x00garbage"), "tokenizer.json"),
    "empty tokenizer": (write(TOKENIZER, b"{}"), "tokenizer.json"),
    "binary generation": (write(GENERATION, b"\xff\xfe\x00\x01"), "generation_config.json"),
    "generation": (write(GENERATION, b"[1]"), "generation_config.json"),
    "temperature": (change(GENERATION, temperature="hot", do_sample=True), "generation_config"),
    "eos": (change(GENERATION, eos_token_id=10**9), "eos_token_id"),
    "eos text": (change(GENERATION, eos_token_id="end"), "eos_token_id"),
    "bos": (change("tokenizer_config.json", bos_token=[1]), "bos_token"),
    "template": (change("tokenizer_config.json", chat_template="{% for"), "chat_template, line 1"),
    "template kind": (change("tokenizer_config.json", chat_template=5), "chat_template"),
    "template fault": (change("tokenizer_config.json", chat_template="{{ a.b.c }}"), "'a'"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named_at_once(folder: Path, name: str) -> None:
    spoil, words = WRONG[name]
    spoil(folder)
    start = time.thread_time()
    with pytest.raises(CheckpointError, match=words) as caught:
        check_files(EngineConfig.build(model=str(folder)))
    assert time.thread_time() - start < 2
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 800


def test_a_good_one_is_fine(folder: Path) -> None:
    check_files(EngineConfig.build(model=str(folder)))
    assert Tokenizer(folder, 260).chat(HI)


ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "product": "{{ 'a' * 1000000000 }}",
    "list": "{{ range(100000)|list * 100000 }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "join": "{% set n = namespace(x='aaaa') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}"
    "{% endfor %}",
    "sum": "{% set n = namespace(x='aaaa') %}{% for i in range(40) %}{% set n.x = n.x + n.x %}"
    "{% endfor %}",
    "width": "{{ 'a'.ljust(1000000000) }}",
    "filter": "{{ 'a'|center(1000000000) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent filter": "{{ '%1000000000d'|format(1) }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "output": "{% for i in range(90000) %}{{ 'a' * 10000 }}{% endfor %}",
    "escape": "{{ ''.__class__.__mro__ }}",
    "limits": "{% set limits_ = 1 %}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_templates_without_end_are_refused(name: str) -> None:
    start = time.thread_time()
    with pytest.raises(CheckpointError, match="chat_template"):
        ChatTemplate(ENDLESS[name], {})
    assert time.thread_time() - start < chat_template.MOST_S + 3


def test_a_template_that_fails_later_fails_its_request_alone() -> None:
    template = ChatTemplate("{% if messages|length > 1 %}{{ a.b.c }}{% endif %}ok", {})
    assert template.render(HI, None) == "ok"
    with pytest.raises(InvalidRequest, match="fails at these messages: UndefinedError") as caught:
        template.render(HI * 2, None)
    assert caught.value.param == "messages"
    refusing = ChatTemplate("{{ raise_exception('only pairs') }}", {})
    with pytest.raises(InvalidRequest, match="refuses: only pairs"):
        refusing.render(HI, None)


def test_templates_work_as_before() -> None:
    text = (
        "{% for m in messages recursive %}{% if loop.first %}{{ bos_token }}{% endif %}"
        "{{ m.role ~ ':' ~ m.content | trim }}{% if loop.last %}.{% endif %}{% else %}none"
        "{% endfor %}{% for key, value in {'a': 1}.items() %}{{ key }}{{ value }}{% endfor %}"
        "{{ '%02d' % 7 }}{{ '{:>3}'.format('x') }}{{ [1] | tojson(indent=1) }}{{ 'ab' * 2 }}"
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{{ strftime_now('%d') | length }}{{ tools is none }}{{ messages[0]['content'][1:3] }}"
    )
    made = ChatTemplate(text, {"bos_token": "<s>"}).render(HI, None)
    assert made == "<s>user:hello.a107  x[\n 1\n]abab012Trueel"
