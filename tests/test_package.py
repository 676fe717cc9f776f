"""What an installed package says of itself."""

import re
import tomllib
from importlib import metadata, resources
from pathlib import Path

from packaging.requirements import Requirement

import overlap_spec

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_has_one_source() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {
        "attr": "overlap_spec.__version__"
    }
    assert re.fullmatch(r"\d+\.\d+\.\d+", overlap_spec.__version__)


def test_type_checkers_read_the_package() -> None:
    assert resources.files(overlap_spec).joinpath("py.typed").is_file()
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"]["overlap_spec"]


def test_the_licence_is_the_one_that_is_named() -> None:
    assert PROJECT["project"]["license"] == "Apache-2.0"
    lines = (ROOT / "LICENSE").read_text().splitlines()
    assert (lines[0].strip(), lines[1].strip()) == ("Apache License", "Version 2.0, January 2004")


def test_dependencies_end_where_tests_do() -> None:
    for line in PROJECT["project"]["dependencies"]:
        needed = Requirement(line)
        assert any(each.operator == "<" for each in needed.specifier), f"{line} has no upper bound"
        assert metadata.version(needed.name) in needed.specifier, line
