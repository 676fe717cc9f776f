"""The documents name what is there: laws, files, links, commands."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
PAGES += sorted((ROOT / "docs").glob("*.md"))
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


def test_the_laws_that_tests_cite_are_numbered() -> None:
    laws = [int(n) for n in re.findall(r"^(\d+)\. \*\*", ARCHITECTURE, re.MULTILINE)]
    assert laws == list(range(1, 11))
    cited: set[int] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        for said in re.findall(r"\b[Ll]aws? (\d+(?:(?:, | and | to )\d+)*)", path.read_text()):
            cited |= {int(n) for n in re.findall(r"\d+", said)}
    assert cited
    assert cited <= set(laws)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings}
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("#"):
            assert link[1:] in anchors, link
        elif "://" not in link:
            assert (page.parent / link.partition("#")[0]).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_benchmarks_exist(page: Path) -> None:
    text = page.read_text()
    paths = set(re.findall(r"`((?:overlap_spec|grammar|kernels|tests|bench|docs)/[\w./-]+)`", text))
    missing = {path for path in paths if "NAME" not in path and not (ROOT / path).exists()}
    missing -= {path for path in missing if "DATE" in path}
    assert not missing
    for name in re.findall(r"python -m (bench\.\w+)", text):
        if name != "bench.NAME":
            assert importlib.util.find_spec(name) is not None, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_records_that_are_named_are_there(page: Path) -> None:
    named = set(re.findall(r"\b(?:cpu|gpu)-[\w.-]+\.(?:json|svg)", page.read_text()))
    assert {name for name in named if not (ROOT / "bench" / "results" / name).exists()} == set()


@pytest.mark.parametrize("page", ["figures.md", "measured.md"])
def test_figures_have_a_record(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    assert not re.findall(r"no\s+record\s+kept|by\s+hand,\s+no", text)
