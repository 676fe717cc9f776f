"""The wheel by itself: nothing of it needs the repository."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.ci
ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "overlap_spec"
# What a build reads.
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "overlap_spec", "grammar", "kernels")
# A package beside it that it leaves out.
LEFT_OUT = "examples"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy and unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in (*SOURCES, LEFT_OUT):
        given = ROOT / name
        if given.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(given, source / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(given, source)
    build = "import sys\nfrom setuptools import build_meta\nbuild_meta.build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", build, str(folder)], cwd=source, check=True, capture_output=True
    )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder / "site")
    shutil.rmtree(source)
    return folder / "site"


def run(site: Path, code: str) -> str:
    """Python in an empty folder, with the wheel's package."""
    work = site.parent / "work"
    work.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=work,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_has_every_file_of_the_package(site: Path) -> None:
    missing = []
    for room in ("overlap_spec", "grammar", "kernels"):
        for path in sorted((ROOT / room).rglob("*")):
            name = path.relative_to(PACKAGE if room == "overlap_spec" else ROOT)
            made = site / "overlap_spec" / name
            if path.is_file() and "__pycache__" not in name.parts and not made.is_file():
                missing.append(str(name))
    assert not missing
    assert {path.name.partition("-")[0] for path in site.iterdir()} == {"overlap_spec"}


def test_its_commands_load_and_its_bench_has_requests(site: Path) -> None:
    said = run(
        site,
        "import overlap_spec\n"
        "from overlap_spec.cli import app\n"
        "from overlap_spec.load.asks import OWN_SCHEMAS\n"
        "from overlap_spec.load.measure import draw_asks\n"
        "print(overlap_spec.__file__)\n"
        "print(len(draw_asks('mixed', OWN_SCHEMAS, 24, 8, 0)), len(app.registered_commands))",
    )
    place, counts = said.splitlines()
    assert Path(place).is_relative_to(site)
    assert counts == "24 8"
