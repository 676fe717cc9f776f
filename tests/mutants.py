"""Changes of the product that the everyday tests must notice.

``python -m tests.mutants [NUMBER …]`` makes each change in a copy of the package, runs the tests
that are named for it there, and expects them to fail; before, they must pass in the copy as it is.
Exit status 1 where one survives. ``tests/test_mutants.py`` checks that what is replaced is there.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("overlap_spec", "grammar", "kernels", "bench", "examples", "tests", "pyproject.toml")


class Mutant(NamedTuple):
    """``old`` of ``file`` becomes ``new``, which ``tests`` notice."""

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


SCHEDULER = "overlap_spec/scheduler/scheduler.py"
AUTO = "overlap_spec/speculation/auto.py"
T_SCHEDULER = "tests/scheduler/test_scheduler.py::"
T_AUTO = "tests/speculation/test_auto.py::"
T_RECORDINGS = "tests/proofs/test_recordings.py::"
MUTANTS = (
    Mutant(
        "ranks do not compare their trees",
        "overlap_spec/worker/messages.py",
        "if int(told[1]) != _mark(step):",
        "if False:",
        ("tests/worker/test_ranks_faults.py::test_a_decision_over_other_trees_is_refused",),
    ),
    Mutant(
        "graphs of drafts write to expanded tensors",
        "overlap_spec/worker/graphs.py",
        "tuple(x.contiguous() for x in found)",
        "found",
        ("tests/proofs/test_recordings.py::test_a_step_replays_the_draft_that_it_wants",),
    ),
    Mutant(
        "batches between powers of two are recorded in a live step",
        "overlap_spec/worker/warm_up.py",
        "range(1, most + 1) if own else powers_of_two(most)",
        "powers_of_two(most)",
        (T_RECORDINGS + "test_no_request_waits_for_a_recording_or_for_memory",),
    ),
    Mutant(
        "graphs of the target's pass share no memory",
        "overlap_spec/worker/cuda_graphs.py",
        "if not room or any(",
        "if True or any(",
        (T_RECORDINGS + "test_outputs_of_all_graphs_fit_into_what_is_set_aside",),
    ),
    Mutant(
        "what comes behind the drafts is recorded for each tier",
        "overlap_spec/worker/cuda_graphs.py",
        "return replace(tier, top_k=min(tier.top_k, 2), base=base)",
        "return tier if base is None else tier",
        (T_RECORDINGS + "test_few_graphs_are_recorded_at_the_start",),
    ),
    Mutant(
        "what a step keeps is let go of before its streams are through",
        "overlap_spec/worker/worker.py",
        "copy.record(events.results_on_host)\n        step.buffers.keep = step.tensors",
        "copy.record(events.results_on_host)",
        ("tests/proofs/test_races.py::test_no_stream_races_another",),
    ),
    Mutant(
        "mask rows of drafts that nobody verifies go up",
        "overlap_spec/worker/in_flight.py",
        "living[(links[1:] + first)[linked]] = True",
        "living[:] = True",
        ("tests/proofs/test_masks.py::test_no_mask_row_goes_up_that_no_grammar_reads",),
    ),
    Mutant(
        "what is drawn after a refused draft may be that draft again",
        "overlap_spec/worker/acceptance.py",
        "gone = torch.where(tree.parents >= 0, 0.0, torch.inf)",
        "gone = torch.full_like(tree.scores, torch.inf)",
        (
            "tests/worker/test_acceptance.py::test_thresholds_near_one_have_the_targets_distribution",
        ),
    ),
    Mutant(
        "a tier that is not recorded is taken at once",
        AUTO,
        "now = int(np.where(pays, maybe, -np.inf).argmax())",
        "now = int(maybe.argmax())",
        (T_AUTO + "test_a_tier_that_is_not_recorded_waits_until_that_pays",),
    ),
    Mutant(
        "what is unlikely to be better is tried as often",
        AUTO,
        "HOPE = 0.4",
        "HOPE = 5.0",
        (T_AUTO + "test_probes_cost_little",),
    ),
    Mutant(
        "pages that a prompt still needs are given to others",
        SCHEDULER,
        "if promised + needed > self.allocator.free_count:",
        "if needed > self.allocator.free_count:",
        (T_SCHEDULER + "test_pages_that_a_prompt_still_needs_are_promised_to_it",),
    ),
    Mutant(
        "minContains of 2 is read as 1",
        "grammar/lowering/local_keywords.py",
        "1 if least is None else least",
        "1 if least is None else min(least, 1)",
        ("tests/grammar/test_lowering_exact.py",),
    ),
    Mutant(
        "a stream holds its body to its end",
        "overlap_spec/server/middleware.py",
        "                body.release()\n            if message",
        "                pass\n            if message",
        ("tests/server/test_bounds.py::test_a_stream_that_has_begun_holds_its_body_no_longer",),
    ),
    Mutant(
        "a grammar that is compiled for ever is not ended",
        "grammar/isolation/server.py",
        "answer = await self._answer(given, left_s)",
        "answer = await self._answer(given, 3600)",
        ("tests/grammar/test_isolation.py::test_what_goes_wrong_costs_one_grammar",),
    ),
    Mutant(
        "pages that the step under way reads are taken from a request",
        SCHEDULER,
        "if self._committed < self._steps:",
        "if self._committed > self._steps:",
        (T_SCHEDULER + "test_nobody_gives_up_pages_that_the_step_under_way_reads",),
    ),
    Mutant(
        "requests of low priority starve",
        SCHEDULER,
        "if self._starts % FAIR_TURN == FAIR_TURN - 1:",
        "if self._starts < 0:",
        (T_SCHEDULER + "test_low_priority_does_not_starve",),
    ),
    Mutant(
        "priorities order nothing",
        SCHEDULER,
        "lambda s: (-s.request.priority, s.request.id)",
        "lambda s: (0, s.request.id)",
        (T_SCHEDULER + "test_priorities_and_arrival_order",),
    ),
    Mutant(
        "the first prompt keeps nothing of a step beside short ones",
        "overlap_spec/scheduler/prefill.py",
        "kept = min(needed[0], max(left // 2, size))",
        "kept = 0",
        (T_SCHEDULER + "test_short_prompts_leave_half_of_a_step_to_the_first",),
    ),
    Mutant(
        "a numeric fault's pages are reused",
        "overlap_spec/scheduler/pages.py",
        "sequence.untrusted = True",
        "sequence.untrusted = False",
        (T_SCHEDULER + "test_pages_of_a_numeric_fault_are_cleared_when_nobody_holds_them",),
    ),
    Mutant(
        "of two stop strings the later one ends a text",
        "overlap_spec/scheduler/stops.py",
        "end, stop = min(ends)",
        "end, stop = max(ends)",
        (T_SCHEDULER + "test_cut",),
    ),
    Mutant(
        "the beginning of a stop string is shown",
        "overlap_spec/scheduler/stops.py",
        "if self._stops and not finished:",
        "if self._stops and finished:",
        (T_SCHEDULER + "test_released_text_never_shows_part_of_a_stop_string",),
    ),
    Mutant(
        "drafts may be deeper than their tier",
        "overlap_spec/drafters/sound.py",
        "reached = own == 0",
        "reached = own >= 0",
        ("tests/drafters/test_drafters.py::test_each_clause_alone",),
    ),
    Mutant(
        "two siblings may have one token",
        "overlap_spec/drafters/sound.py",
        "good &= ~(twins & good[:, None, :] & (index < index[:, None])).any(-1)",
        "good &= twins.any(-1)",
        ("tests/drafters/test_drafters.py::test_each_clause_alone",),
    ),
    Mutant(
        "frequency is rewarded",
        "kernels/sampling.py",
        "logits -= frequency[:, None] * output_counts",
        "logits += frequency[:, None] * output_counts",
        ("tests/worker/test_sampling.py::test_penalties_by_hand",),
    ),
    Mutant(
        "a repeated token of a negative logit is preferred",
        "kernels/sampling.py",
        "torch.where(logits > 0, logits / factor, logits * factor, out=logits)",
        "logits /= factor",
        ("tests/worker/test_sampling.py::test_penalties_by_hand",),
    ),
    Mutant(
        "coins of one request depend on no position",
        "kernels/sampling.py",
        "_mix(seeds + _GOLDEN) + positions * _GOLDEN",
        "_mix(seeds + _GOLDEN) + positions * 0",
        (
            "tests/worker/test_sampling.py::test_coins_are_uniform_and_depend_on_seed_position_and_purpose_alone",
        ),
    ),
    Mutant(
        "a growing tree keeps its worst branches",
        "kernels/tree.py",
        "best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]",
        "best = scores.sort(dim=-1, descending=False, stable=True).indices[:, :k]",
        ("tests/kernels/test_tree.py::test_growth_takes_the_best_children_of_all_branches",),
    ),
    Mutant(
        "a child is accepted whatever its probability",
        "kernels/acceptance.py",
        "good = probs >= least.expand_as(probs).gather(1, above)",
        "good = probs >= 0",
        ("tests/worker/test_acceptance.py::test_the_kernel_by_an_example",),
    ),
    Mutant(
        "nodes are left out until none is worth it",
        "overlap_spec/tiers.py",
        "if found <= best and best >= 0:",
        "if found < 0:",
        ("tests/speculation/test_adaspec.py::test_elimination_by_hand",),
    ),
    Mutant(
        "a policy's tier beyond those that it named is run",
        "overlap_spec/engine/budgets.py",
        "if budget.tier not in policy.tiers:",
        "if budget.tier is None:",
        (T_AUTO + "test_a_policy_that_fails_gives_way",),
    ),
    Mutant(
        "one who asks for much takes others' part",
        "overlap_spec/shares.py",
        "return held.get(holder, 0) + amount <= part and total <= 2 * most",
        "return total <= 2 * most",
        ("tests/test_shares.py",),
    ),
    Mutant(
        "what overlaps is counted twice",
        "overlap_spec/timeline.py",
        "total += end - int(max(start, covered))",
        "total += end - start",
        ("tests/engine/test_timeline.py::test_union_counts_covered_ticks",),
    ),
    Mutant(
        "prompts that were computed under one salt are found under another",
        "overlap_spec/scheduler/prefix.py",
        "yield (salt, *page) if salt and start == 0 else page",
        "yield page",
        ("tests/scheduler/test_pages.py",),
    ),
    Mutant(
        "each address of an IPv6 network is a client of its own",
        "overlap_spec/server/keys.py",
        "if known.ipv4_mapped is None:",
        "if known.is_loopback:",
        ("tests/server/test_keys.py::test_an_address_counts_as_its_network",),
    ),
    Mutant(
        "an n-gram's oldest and newest continuations are confused",
        "overlap_spec/drafters/ngram.py",
        "[NgramTable(oldest, keep_all) for _ in range(size)]",
        "[NgramTable(not oldest, keep_all) for _ in range(size)]",
        ("tests/drafters/test_lookup.py::test_a_chain_is_what_a_plain_search_finds",),
    ),
)


def copied(folder: Path) -> Path:
    """The tree in a folder; the embedded model's weights are links."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            weights = shutil.ignore_patterns("__pycache__", "*.safetensors")
            shutil.copytree(source, folder / name, symlinks=True, ignore=weights)
        else:
            shutil.copy(source, folder / name)
    for weights in (ROOT / "overlap_spec").rglob("*.safetensors"):
        (folder / weights.relative_to(ROOT)).symlink_to(weights)
    return folder


def run(folder: Path, tests: Iterable[str]) -> int:
    """Pytest's exit status."""
    words = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist")
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    everyday = ("-m", "not ci")
    command = [sys.executable, *words, *everyday, *tests]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
    return done.returncode


def main(arguments: Sequence[str]) -> int:
    """The command line; how many survived."""
    chosen = [MUTANTS[int(number) - 1] for number in arguments] or list(MUTANTS)
    survived = 0
    with tempfile.TemporaryDirectory(prefix="overlap-spec-mutants-") as temporary:
        folder = copied(Path(temporary))
        if run(folder, dict.fromkeys(test for mutant in chosen for test in mutant.tests)):
            print("the tests fail without a mutant", file=sys.stderr)
            return 1
        for mutant in chosen:
            path = folder / mutant.file
            text = path.read_text(encoding="utf-8")
            path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
            status = run(folder, mutant.tests)
            path.write_text(text, encoding="utf-8")
            survived += status != 1
            told = "killed" if status == 1 else f"SURVIVED (pytest's exit status {status})"
            print(f"{MUTANTS.index(mutant) + 1:2} {told}: {mutant.what}", flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} killed")
    return survived


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
