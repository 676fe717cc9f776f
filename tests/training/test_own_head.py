"""`overlap-spec train`: data files, stops, cached features, and what the head is worth."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.progress import Progress

from examples.embedded_model.target import embedded_config, export_target, new_target
from examples.embedded_model.tokenizer import corpus, train_tokenizer
from overlap_spec import Engine, SamplingParams, cli
from overlap_spec.cli.train import show
from overlap_spec.errors import ConfigError
from overlap_spec.models.config import RopeConfig
from overlap_spec.models.decoder import Decoder
from overlap_spec.models.weights import load_decoder, load_eagle3
from overlap_spec.tokenizer import Tokenizer
from overlap_spec.training import budget, generate, own_head
from overlap_spec.training.acceptance import Acceptance, acceptance
from overlap_spec.training.batches import Batch, RowStream
from overlap_spec.training.export import export_head
from overlap_spec.training.features import fill_cache
from overlap_spec.training.head import DraftPass, HeadRecipe, new_eagle, new_head, read_layers
from overlap_spec.training.own_head import draft_vocabulary, train_head
from overlap_spec.training.progress import Bars
from overlap_spec.training.samples import read_samples
from overlap_spec.training.settings import HeadSettings
from tests.support.models import TRAINED
from tests.support.tiers import few

CPU = torch.device("cpu")
CHATS = [
    [("user", f"Anna paid {n} euros."), ("assistant", f'{{"name":"Anna","paid":{n}}}')]
    for n in range(30)
]


def chat_line(turns: list[tuple[str, str]]) -> str:
    return json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target with random weights, and a file of chats."""
    path = tmp_path_factory.mktemp("target")
    config = replace(embedded_config(512), **TRAINED | {"max_position": 256})
    target = new_target(config, 1)
    export_target(target, train_tokenizer(corpus(0, 200, []), 512), path)
    (path / "chats.jsonl").write_text("\n".join(map(chat_line, CHATS)))
    return path


def settings(folder: Path, out: Path, **changes: Any) -> HeadSettings:
    asked = {"epochs": 2.0, "max_length": 96, "batch_tokens": 256, **changes}
    return HeadSettings(folder, folder / "chats.jsonl", out, **asked)


class StopAt:
    """Says stop at the given report, counted over all bars."""

    def __init__(self, report: int) -> None:
        self.left = report

    def __call__(self) -> bool:
        self.left -= 1
        return self.left == 0


def train(asked: HeadSettings, stop: int = -1) -> bytes:
    """The head's file; KeyboardInterrupt at report ``stop``."""
    train_head(asked, CPU, Bars(Progress(disable=True), StopAt(stop)))
    return (asked.out / "model.safetensors").read_bytes()


@pytest.mark.ci
@pytest.mark.parametrize(
    ("changes", "stops"),
    few(
        [
            ({}, (1, 3)),
            ({"own_answers": True}, (1, 5)),  # in the answers, and in the steps
            ({"cache_features": True}, (5, 32)),  # in the features, and in the steps
            ({"algorithm": "eagle"}, (1, 3)),
            ({"algorithm": "parallel"}, (1, 3)),
        ],
        ({}, (1, 3)),
    ),
    ids=str,
)
def test_a_stopped_training_ends_with_the_weights_of_an_unbroken_one(
    folder, tmp_path, changes, stops
):
    whole = train(settings(folder, tmp_path / "whole", **changes))
    asked = settings(folder, tmp_path / "stopped", **changes)
    for stop in stops:
        with pytest.raises(KeyboardInterrupt):
            train(asked, stop)
    checkpoint = torch.load(asked.out / "work" / "checkpoint.pt", weights_only=True)
    assert checkpoint["step"] > 0
    assert not (asked.out / "model.safetensors").exists()
    assert train(asked) == whole
    report = json.loads((asked.out / "report.json").read_text())
    assert report["steps"] > checkpoint["step"]


class Clock:
    """In the place of ``time``: each look at it takes a twentieth of a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 0.05
        return self.now


def test_a_training_keeps_its_minutes(folder, tmp_path, monkeypatch):
    clock = Clock()
    for module in (own_head, generate, budget):
        monkeypatch.setattr(module, "time", clock)
    asked = settings(folder, tmp_path / "out", epochs=None, minutes=0.1, own_answers=True)
    with pytest.raises(KeyboardInterrupt):
        train(asked, 3)
    work = asked.out / "work"
    answered, minutes = (work / "answers.jsonl").read_text(), (work / "minutes.json").read_text()
    assert 0 < answered.count("\n") < len(CHATS) * 19 // 20
    train(asked)
    assert json.loads((asked.out / "report.json").read_text())["steps"] > 5
    assert (work / "answers.jsonl").read_text() == answered
    assert (work / "minutes.json").read_text() == minutes
    clock.now = 0.0
    train(replace(asked, out=tmp_path / "whole"))
    assert 5.5 < clock.now < 6.5


def test_a_head_that_drafts_nothing_right_is_told(tmp_path, capsys):
    show(Acceptance(9, 9, (9, 0), (0, 0)), tmp_path)
    told = capsys.readouterr().out
    assert "accept length 1.00" in told
    assert "none of its drafts was accepted" in told
    show(Acceptance(12, 9, (9, 3), (3, 0)), tmp_path)
    assert "none" not in capsys.readouterr().out


@pytest.mark.parametrize("algorithm", few(["eagle3", "eagle"], "eagle3"))
def test_the_command_makes_a_head_that_the_engine_drafts_with(
    folder, tmp_path, capsys, monkeypatch, algorithm
):
    out = tmp_path / "head"
    words = f"overlap-spec train --target {folder} --data {folder}/chats.jsonl --out {out}"
    words += " --epochs 1 --max-length 96 --batch-tokens 256 --device cpu"
    words += f" --algorithm {algorithm}"
    monkeypatch.setattr(sys, "argv", words.split())
    cli.main()
    assert "accept length" in capsys.readouterr().out
    report = json.loads((out / "report.json").read_text())
    assert report["checked_prompts"] == 1
    assert report["tokens"] > 0
    assert 1 <= report["accept_length"] <= 6
    assert len(report["accepted_by_position"]) == len(report["tried_by_position"]) == 5
    texts = []
    for draft in ({"draft": str(out), "algorithm": algorithm}, {"algorithm": "none"}):
        with Engine(str(folder), **draft) as engine:
            output = engine.generate("Anna paid 3 euros.", None, SamplingParams(max_tokens=12))
            texts.append((output.text, output.stats.verifies > 0))
    assert texts[0][0] == texts[1][0]
    assert texts[0][1]


def test_the_command_tells_what_is_wrong(folder, tmp_path, capsys, monkeypatch):
    words = f"overlap-spec train --target {folder} --data {tmp_path}/none --out {tmp_path}/head"
    words += " --max-length 96"
    monkeypatch.setattr(sys, "argv", words.split())
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    said = "cannot be read: no such file or directory"
    assert capsys.readouterr().err == f"error: {tmp_path}/none {said}\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", ":2: not JSON"),
        ("[]", ":2: an object"),
        ('{"message": []}', ":2: either messages or text is expected; its fields: message"),
        ('{"text": 3}', ":2: text: must be a string"),
        ('{"messages": []}', ":2: messages: must be a list"),
        ('{"messages": ["x"]}', r":2: messages\[0\]: must be an object"),
        ('{"messages": [{"role": "bot", "content": ""}]}', r":2: messages\[0\].role: must be one"),
        ('{"messages": [{"role": "user"}]}', r":2: messages\[0\].content: must be a string"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', r"\[0\].role: a chat cannot"),
        ('{"messages": [{"role": "user", "content": "a"}]}', ":2: messages: the last one is of"),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": 1}', ":2: tools: must be"),
    ],
)
def test_a_line_at_fault_is_named(folder, tmp_path, line, said):
    file = tmp_path / "data.jsonl"
    file.write_text(f'{{"text": "one"}}\n{line}\n')
    with pytest.raises(ConfigError, match=said) as raised:
        read_samples(file, Tokenizer(folder, 512), 96, answered=True)
    assert str(file) in str(raised.value)


def test_files_that_hold_too_little_are_refused(folder, tmp_path):
    tokenizer = Tokenizer(folder, 512)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_samples(tmp_path / "none.jsonl", tokenizer, 96, answered=True)
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(map(chat_line, CHATS[:2])))
    with pytest.raises(ConfigError, match="2 have no answer within max_length = 8"):
        read_samples(file, tokenizer, 8, answered=True)


def test_every_answer_of_a_chat_is_learnt_and_only_answers(folder, tmp_path):
    tokenizer = Tokenizer(folder, 512)
    turns = [("user", "Hi"), ("assistant", "Hello"), ("user", "Bye"), ("assistant", "So long")]
    file = tmp_path / "data.jsonl"
    file.write_text(f'{chat_line(turns)}\n{{"text": "all of this"}}\n')
    samples, left_out = read_samples(file, tokenizer, 96, answered=True)
    assert left_out == 0
    ids, weights = (list(part) for part in samples[0].row)
    prompt = samples[0].prompt
    learnt = [token for token, weight in zip(ids, weights, strict=True) if weight == 1]
    assert learnt == tokenizer.encode("Hello<|end|>So long<|end|>")
    assert sorted(set(weights)) == pytest.approx([0.1, 1.0])
    asked = [{"role": role, "content": text} for role, text in turns]
    assert ids[:prompt] == tokenizer.chat(asked[:3])
    assert tokenizer.encode(tokenizer.render(asked, open_answer=False)) == ids
    text = tokenizer.encode("all of this", special=True)
    assert [list(part) for part in samples[1].row] == [text, [1.0] * len(text)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"minutes": 1.0}, "epochs or minutes"),
        ({"epochs": 0.0}, "epochs must be more than 0"),
        ({"max_length": 300}, "max_length must be from 16 to 256"),
        ({"draft_vocab_size": 0}, "draft_vocab_size must be"),
        ({"algorithm": "medusa"}, "algorithm must be eagle, eagle3, parallel: 'medusa'"),
    ],
)
def test_wrong_settings_are_named(folder, tmp_path, changes, said):
    with pytest.raises(ConfigError, match=said):
        train(settings(folder, tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()


def test_a_folder_belongs_to_one_training(folder, tmp_path):
    asked = settings(folder, tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        train(asked, 1)
    with pytest.raises(ConfigError, match="differs in max_length, seed"):
        train(replace(asked, seed=2, max_length=80))
    with pytest.raises(ConfigError, match="another origin"):
        train(replace(asked, out=folder))


@pytest.mark.parametrize("make", [new_head, new_eagle])
def test_cached_features_are_those_of_the_target(folder, tmp_path, make):
    target = load_decoder(folder, torch.bfloat16, CPU)
    head = make(target, HeadRecipe(draft_vocab=tuple(range(3, 90))))
    rows = [[7, 8, 9, 30], [11, 12], [40, 41, 42]]
    arguments = (tmp_path / "f.bin", rows, target, read_layers(head))
    fill_cache(*arguments, lambda _: None)
    cache = fill_cache(*arguments, lambda _: pytest.fail("made twice"))
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    tokens[0, :3], tokens[1, :4] = torch.tensor(rows[2]), torch.tensor(rows[0])
    draft = DraftPass(head, target, 2, 6, HeadRecipe(steps=1, compile=False))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted = draft.observe(tokens)
        got = cache.read(Batch(tokens, torch.ones(2, 6), 7, (2, 0)), target, draft.ids)
    for one, other in zip(got, wanted, strict=True):
        for row, size in ((0, 3), (1, 4)):
            assert torch.allclose(one[row, :size], other[row, :size], atol=0.05)
            assert one[row, :size].abs().max() > 0.1


def test_a_stream_of_rows_goes_through_all_of_them_and_resumes():
    rows = [([n] * (1 + n % 7), [1.0] * (1 + n % 7)) for n in range(20)]
    stream = RowStream(rows, 3, 16, pad=0, widths=(4, 8))
    seen = [number for _ in range(30) for number in stream.next().numbers]
    assert {seen.count(number) for number in range(20)} <= {seen.count(0) + d for d in (-1, 0, 1)}
    copy = RowStream(rows, 3, 16, pad=0, widths=(4, 8))
    copy.restore(stream.state())
    for _ in range(9):
        one, other = stream.next(), copy.next()
        assert one.numbers == other.numbers
        assert torch.equal(one.tokens, other.tokens)
        assert one.length == int(one.weights.sum())


def test_acceptance_is_counted_by_position():
    # Root 1 drafts 12, 13 and then a wrong one; root 4 drafts 15 and the run ends.
    table = torch.full((3, 6), -1)
    table[0, 1], table[1, 1], table[0, 4] = 12, 13, 15
    found = acceptance([([10], [11, 12, 13, 14, 15]), ([1], [2])], lambda _: table, "cpu")
    assert (found.tokens, found.verifies) == (4, 2)
    assert (found.tried, found.accepted) == ((2, 1, 1), (2, 1, 0))
    assert found.length == 2
    assert found.by_position == [1.0, 1.0, 0.0]


def test_a_draft_vocabulary_holds_the_ends_and_the_frequent():
    rows = [([5, 5, 9, 3], [1.0, 1.0, 1.0, 0.1]), ([9, 7, 9], [1.0, 1.0, 1.0])]
    assert draft_vocabulary(rows, 3, [2]) == (2, 5, 9)


def test_a_head_keeps_its_targets_rope_and_drops_its_biases(folder, tmp_path):
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 64.0
    config = replace(
        load_decoder(folder, torch.float32, CPU).config,
        rope=RopeConfig(5e5, "llama3", tuple(sorted(scaling.items()))),
        mlp_bias=True, o_bias=True, qk_norm=True, sliding_windows=(8, 8, 8, 8),
    )  # fmt: skip
    target = Decoder(config)
    head = new_head(target, HeadRecipe())
    export_head(head, tmp_path)
    loaded = load_eagle3(tmp_path, target, torch.float32)
    assert torch.equal(loaded.rope, head.rope)
    assert not torch.equal(loaded.rope, load_decoder(folder, torch.float32, CPU).rope)
    layer = replace(
        head.config.layer, architecture="LlamaForCausalLMEagle3", sliding_windows=(None,)
    )
    assert loaded.config.layer == layer
