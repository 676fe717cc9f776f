"""Fixtures that several files share."""

import ctypes
import gc
import multiprocessing
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch

from overlap_spec.kernels import cpu
from tests.support import checkpoints, kernel_harness
from tests.support.skips import check_skip

# The step's own threads are what is tested; more would only fight over the cores.
torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def memory_is_given_back() -> Iterator[None]:
    """Engines that nobody holds are freed, and what threads that ended kept goes to the system."""
    yield
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Engine settings: a random target and a random EAGLE-3 head for it, small grammars."""
    folder = tmp_path_factory.mktemp("tiny")
    checkpoints.write_target(folder / "target")
    checkpoints.write_head(folder / "eagle3")
    return {
        "model": str(folder / "target"),
        "draft": str(folder / "eagle3"),
        # Each length that a policy may take is recorded and measured at the start.
        "adaptive": "static",
        # Each engine would start worker processes of its own; tests of these ask for them.
        "grammar_isolated": False,
        # A machine that does other work as well must not cost a step its drafts.
        "mask_deadline_ms": 5000.0,
    }


@pytest.fixture(scope="session")
def reference(tiny: dict[str, Any]) -> Any:
    """The random target as `transformers` reads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny["model"], dtype=torch.float32).eval()


def interpreting(enter: Callable[[], None]) -> Iterator[ProcessPoolExecutor]:
    """A process whose Triton interprets: the choice is one for a whole process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), enter) as pool:
        yield pool


@pytest.fixture(scope="session")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    yield from interpreting(kernel_harness.enter_interpreter)


@pytest.fixture(scope="session")
def checked() -> Iterator[ProcessPoolExecutor]:
    """The same, where every load and store is checked."""
    yield from interpreting(kernel_harness.enter_checked_interpreter)


def pytest_configure(config: pytest.Config) -> None:
    """The CPU's kernels are compiled before the tests: no test's time is to pay for it."""
    if not hasattr(config, "workerinput"):
        cpu.native()


def pytest_collection_finish() -> None:
    """What was imported stays: no later look for cycles goes through it."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a GPU skip by themselves where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    """Reports of tests."""
    report = yield
    check_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    """Reports of files."""
    report = yield
    check_skip(report)
    return report
