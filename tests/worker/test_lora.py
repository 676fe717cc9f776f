"""LoRA adapters: several in one batch, each as `transformers` has the model with it merged."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from overlap_spec.engine import Engine
from overlap_spec.errors import CheckpointError, ConfigError, InvalidRequest
from overlap_spec.grammar.spec import Grammar
from tests.support.checkpoints import rewrite
from tests.support.lora import write_adapter
from tests.support.models import greedy, of_bytes
from tests.support.tiers import few

TOKENS = 12
LLAMA = "q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj"
# Case → the products of its layers, by their published names.
PRODUCTS = {
    "llama-tied-biased": LLAMA,
    "gemma3": LLAMA,
    "phi4-partial": "qkv_proj|o_proj|gate_up_proj|down_proj",
    "glm4": "q_proj|k_proj|v_proj|o_proj|gate_up_proj|down_proj",
    "stablelm-12b": LLAMA,
    "cohere-plus": LLAMA,
    "falcon-40b": "query_key_value|dense|dense_h_to_4h|dense_4h_to_h",
    "gpt2": "c_attn|c_proj|c_fc",
    "mixtral": "q_proj|k_proj|v_proj|o_proj",
    "deepseek-v3": "q_a_proj|q_b_proj|kv_a_proj_with_mqa|o_proj",
}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {"algorithm": "none"},
    "chain": {"algorithm": "ngram", "num_steps": 3},
    "tree": {
        "algorithm": "draft_model", "num_steps": 3, "eagle_topk": 2, "num_draft_tokens": 6,
    },
}  # fmt: skip


class Adapted:
    """A small model, three adapters of it, and what each makes of it; ``""`` is none."""

    def __init__(self, case: str, folder: Path) -> None:
        self.folder = folder / "model"
        model = of_bytes(case, self.folder, tie_word_embeddings=False)
        every, first = PRODUCTS[case], PRODUCTS[case].split("|")[0]
        self.models = {
            "": model,
            "all": write_adapter(folder / "all", model, every),
            "one": write_adapter(folder / "one", model, first, rank=2, alpha=20.0),
            "rs": write_adapter(folder / "rs", model, every, rank=8, use_rslora=True),
        }
        self.modules = [f"{n}={folder / n}" for n in self.models if n]

    @contextmanager
    def engine(self, shape: str = "plain", **settings: Any) -> Iterator[Engine]:
        drafts = SHAPES[shape]
        if shape == "tree":
            drafts = {**drafts, "draft": str(self.folder)}
        common = {"dtype": "float32", "grammar_isolated": False, "chunked_prefill_size": 16}
        common |= {"adaptive": "static", "lora_modules": self.modules}
        with Engine(str(self.folder), **{**common, **drafts, **settings}) as engine:
            yield engine


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted("llama-tied-biased", tmp_path_factory.mktemp("adapted"))


def together(engine: Engine, asked: list[tuple[list[int], str]], **fields: Any) -> list[list[int]]:
    """The outputs of one batch of prompts, each with an adapter."""
    sampling = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, **fields}
    handles = [engine.submit(prompt, None, sampling, lora=name or None) for prompt, name in asked]
    while engine.step():
        pass
    outputs = [handle.output for handle in handles]
    engine.release(handles)
    assert all(output is not None and not output.error for output in outputs)
    return [list(output.token_ids) for output in outputs if output is not None]


def prompts(lengths: tuple[int, ...] = (1, 5, 40)) -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(0, 256, (n,), generator=draw).tolist() for n in lengths]


@pytest.mark.parametrize(
    ("case", "graphs"),
    few(
        [(case, True) for case in PRODUCTS] + [("llama-tied-biased", False)],
        ("llama-tied-biased", True),
    ),
)
def test_a_batch_of_adapters_is_each_ones_merged_model(
    case: str, graphs: bool, tmp_path: Path
) -> None:
    """Three adapters and none, beside each other: plainly, by chains, and by trees of the bare
    model's drafts."""
    adapted = Adapted(case, tmp_path)
    asked = [(prompt, name) for prompt in prompts() for name in adapted.models]
    want = [greedy(adapted.models[name], prompt, TOKENS) for prompt, name in asked]
    assert len({tuple(tokens) for tokens in want}) > len(want) // 2
    for shape in SHAPES:
        with adapted.engine(shape, graphs=graphs) as engine:
            assert together(engine, asked) == want, shape
            assert [together(engine, [each])[0] for each in asked[:4]] == want[:4]


@pytest.mark.parametrize("overlap", few(["none", "double-sync", "once-sync"], "once-sync"))
def test_prompts_are_read_beside_trees(adapted: Adapted, overlap: str) -> None:
    """Of other adapters, in another stream; some wait for room, and some are thrown out of it."""
    asked = [(p, name) for p in prompts((3, 30, 61, 17)) for name in adapted.models]
    want = [greedy(adapted.models[name], prompt, TOKENS) for prompt, name in asked]
    settings = {"overlap": overlap, "threads": 1, "max_running_requests": 5}
    with adapted.engine("tree", **settings, max_total_tokens=320) as engine:
        assert together(engine, asked) == want


@pytest.mark.parametrize("temperature", few([0.0, 1.0], 1.0))
def test_drafts_change_no_text_under_a_grammar(adapted: Adapted, temperature: float) -> None:
    grammar, texts = Grammar.regex("([a-f]{3} [0-9]+,){3}"), []
    for shape in SHAPES:
        with adapted.engine(shape) as engine:
            fields = {"temperature": temperature, "seed": 7, "max_tokens": 40}
            found = [
                engine.generate("ab", grammar, lora=name, **fields).text
                for name in (None, "all", "one", "rs")
            ]
        texts.append(found)
    assert texts[0] == texts[1] == texts[2]
    assert len(set(texts[0])) == 4


def test_no_page_is_shared_between_adapters(adapted: Adapted) -> None:
    prompt = prompts((50,))[0]
    names = [*adapted.models, *adapted.models]
    sampling = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
    with adapted.engine("chain") as engine:
        outputs = [engine.generate(prompt, None, sampling, lora=n or None) for n in names]
    assert [o.stats.cached_tokens for o in outputs] == [0] * 4 + [48] * 4
    want = [greedy(adapted.models[name], prompt, TOKENS) for name in adapted.models]
    assert [list(o.token_ids) for o in outputs] == want + want


@torch.no_grad()
def test_log_probabilities_are_the_adapters(adapted: Adapted) -> None:
    """Of the prompt, and of a choice's texts."""
    prompt = prompts((20,))[0]
    with adapted.engine() as engine:
        told = engine.generate(prompt, lora="all", max_tokens=1, prompt_logprobs=0)
        weighed = engine.generate(
            prompt, Grammar.choice(["a", "bc"], probabilities=True), lora="all", max_tokens=4
        )
    logits = adapted.models["all"](torch.tensor([prompt])).logits[0].log_softmax(-1)
    want = logits[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
    found = [each.logprob for each in told.prompt_logprobs[1:]]
    assert found == pytest.approx(want, abs=1e-3)
    tokens = engine.tokenizer.encode("bc")
    behind = adapted.models["all"](torch.tensor([[*prompt, *tokens]])).logits[0].log_softmax(-1)
    eos = list(engine.tokenizer.eos_ids)
    start = len(prompt) - 1
    along = sum(float(behind[start + i, token]) for i, token in enumerate(tokens))
    along += float(behind[-1, eos].logsumexp(0))
    assert weighed.choices[1].logprob == pytest.approx(along, abs=1e-3)


def test_who_asks_for_none_of_them_is_told(adapted: Adapted) -> None:
    with (
        adapted.engine() as engine,
        pytest.raises(InvalidRequest, match="no adapter 'other'; there is all, one, rs"),
    ):
        engine.generate("a", lora="other")


MODULES = [
    (["x"], "lora_modules must be name=path: 'x'"),
    (["x="], "lora_modules must be name=path"),
    (["a\nb=p"], "lora_modules must be name=path"),
    (["x=p", "x=q"], "lora_modules: 'x' is named twice"),
]


@pytest.mark.parametrize(("modules", "told"), MODULES)
def test_modules_that_are_none_are_refused(adapted: Adapted, modules: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Engine(str(adapted.folder), lora_modules=modules)
    with pytest.raises(ConfigError, match="set tensor_parallel_size to 1"):
        Engine(str(adapted.folder), lora_modules=["x=p"], tensor_parallel_size=2)


FIELDS = [
    ({"use_dora": True}, "use_dora is not supported"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
    ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is not supported"),
    ({"of_next_year": 1}, "of_next_year is not supported"),
    ({"bias": "all"}, "bias must be 'none': 'all'"),
    ({"peft_type": "IA3"}, "peft_type must be 'LORA'"),
    ({"r": 0}, "r must be a whole number"),
    ({"r": 5}, r"has shape \[4, \d+\], expected \[5, \d+\]"),
    ({"lora_alpha": None}, "lora_alpha must be a number"),
]
A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
FILES: list[tuple[Any, str]] = [
    (lambda s: s.update({A: s[A] * torch.inf}), "numbers that are not finite"),
    (lambda s: s.pop(A), "q_proj.lora_B.weight is no factor"),
    (lambda s: s.pop(A.replace("_A", "_B")), "q_proj.lora_A.weight is no factor"),
    (lambda s: s.update({"base_model.model.lm_head.lora_A.weight": s[A] * 1}), "lm_head"),
    (lambda s: s.update({"base_model.model.model.embed_tokens.lora_embedding_A": s[A] * 1}),
     "lora_embedding_A is no factor"),
    (lambda s: s.clear(), "holds no factors"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "told"), FIELDS)
def test_fields_that_are_not_read_are_refused_by_name(
    fields: dict[str, Any], told: str, adapted: Adapted, tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    write_adapter(folder, adapted.models[""], LLAMA)
    rewrite(folder / "adapter_config.json", **fields)
    with pytest.raises(CheckpointError, match=told), adapted.engine(lora_modules=[f"a={folder}"]):
        pass


@pytest.mark.parametrize(("change", "told"), FILES)
def test_tensors_that_are_not_applied_are_refused_by_name(
    change: Any, told: str, adapted: Adapted, tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    write_adapter(folder, adapted.models[""], LLAMA)
    file = folder / "adapter_model.safetensors"
    state = load_file(file)
    change(state)
    save_file(state, file)
    with pytest.raises(CheckpointError, match=told), adapted.engine(lora_modules=[f"a={folder}"]):
        pass


def test_a_folder_without_an_adapter_is_named(adapted: Adapted, tmp_path: Path) -> None:
    words = r"has no adapter_config\.json"
    with (
        pytest.raises(CheckpointError, match=words),
        adapted.engine(lora_modules=[f"a={tmp_path}"]),
    ):
        pass
