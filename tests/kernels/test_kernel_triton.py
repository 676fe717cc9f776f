"""Every Triton kernel equals its reference: in the interpreter always, on a GPU where one is."""

import inspect
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from overlap_spec import kernels
from tests.support.kernel_cases import MODULES, run_canary, run_case, run_planted
from tests.support.kernel_harness import CASES, CLOSE, close
from tests.support.tiers import few

EXAMPLES = dict.fromkeys(CASES, 15) | {"prefill_attention": 4}
EXAMPLES |= dict.fromkeys(
    ["greedy_choice", "sampled_choice", "filtered_choice", "apply_bitmask", "top_candidates"], 30
)
# Many rows in each example, 24 and 9: fewer of them where the interpreter is slow.
INTERPRETED = EXAMPLES | {"scarce_choice": 4, "filtered_choice": 15}
# Of each kernel, every day.
SHORT = 3
gpu = pytest.mark.gpu
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_every_kernel_has_a_case() -> None:
    text = "".join(inspect.getsource(module) for module in MODULES)
    operations = [n for n in kernels.__all__ if hasattr(getattr(kernels, n), "__wrapped__")]
    assert len(operations) == 24
    assert [name for name in operations if f"triton(kernels.{name}, " not in text] == []
    assert text.count("\n@case\n") == len(CASES)


@pytest.mark.parametrize(
    ("name", "examples"),
    few([*INTERPRETED.items(), *((name, SHORT) for name in CASES)], ("tree_attention", SHORT)),
)
def test_kernel_in_the_interpreter(
    name: str, examples: int, interpreter: ProcessPoolExecutor
) -> None:
    interpreter.submit(run_case, name, examples, "cpu").result()


@pytest.mark.ci
@pytest.mark.parametrize(
    ("step", "back", "past", "slack", "error"),
    [
        (8, 0, 0, False, None),
        (8, 0, 1, False, "lie in no argument"),
        (8, 0, 1, True, "lie beside their argument"),
        (7, 0, 0, False, "touches what 1 wrote"),
        (8, 1, 0, False, "touches what 1 wrote"),
        (8, -8, 0, False, "writes what 1 read"),
    ],
)
def test_the_interpreter_checks_what_kernels_touch(
    step: int, back: int, past: int, slack: bool, error: str | None, checked: ProcessPoolExecutor
) -> None:
    """Beyond an argument, or what another program writes or reads."""
    run = checked.submit(run_planted, 16, step, back, past, slack)
    if error is None:
        run.result()
        return
    with pytest.raises(Exception, match=error):
        run.result()


def test_a_key_that_attention_may_not_read_is_a_canary(interpreter: ProcessPoolExecutor) -> None:
    interpreter.submit(run_canary, 0).result()
    with pytest.raises(AssertionError):
        interpreter.submit(run_canary, 1).result()


@pytest.mark.ci
@pytest.mark.parametrize("name", CASES)
def test_every_kernel_touches_its_arguments_alone(name: str, checked: ProcessPoolExecutor) -> None:
    checked.submit(run_case, name, 3, "cpu").result()


@gpu
@needs_cuda
@pytest.mark.parametrize("name", CASES)
def test_kernel_on_the_gpu(name: str) -> None:
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        # Nearly each example is a kernel of its own, to be compiled.
        run_case(name, EXAMPLES[name], "cuda")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


@gpu
@needs_cuda
def test_kernels_on_the_gpu_neither_wait_nor_leave_a_graph() -> None:
    """Each operation's capture in a CUDA graph replays to what it computed outside, unwaited."""
    from bench.gpu import tensors
    from bench.kernel_work import Draw, works
    from overlap_spec.kernels.dispatch import use

    for work in works(Draw(torch.device("cuda"), torch.bfloat16, 1), (2,)):
        args = work.draw()
        with torch.inference_mode(), use("triton"):
            want = [t.clone() for t in tensors(work.operation(*args))]
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    result = work.operation(*args)
                graph.replay()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
        got = list(tensors(result))
        assert len(got) == len(want), work.name
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), work.name


@pytest.mark.ci
def test_kernel_comparison_fails_on_errors_and_nan() -> None:
    want = torch.linspace(1, 2, 50)
    close(want * (1 + CLOSE[torch.float32] / 4), want)
    for wrong in (want * 1.0001, want.index_fill(0, torch.tensor([3]), torch.nan), want[:-1]):
        with pytest.raises(AssertionError):
            close(wrong, want)
