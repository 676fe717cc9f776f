"""What a library imports and does not need is not imported, until it is asked for."""

import subprocess
import sys
from pathlib import Path

import pytest

from overlap_spec.grammar.isolation.import_stubs import awaiting

LATE = "class Real: ...\nclass Other: ...\n"


def test_a_module_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "awaited_late.py").write_text(LATE)
    (tmp_path / "awaited_user.py").write_text("from awaited_late import Real, Other\n")
    monkeypatch.syspath_prepend(tmp_path)
    with awaiting("awaited_late"):
        import awaited_user  # type: ignore[import-not-found]
    assert "awaited_late" not in sys.modules
    assert awaited_user.Real.__name__ == "Real"
    # The first test imports it, and is right.
    assert not isinstance(3, awaited_user.Real)
    real = sys.modules["awaited_late"]
    assert isinstance(real.Real(), awaited_user.Real)
    assert not isinstance(real.Other(), awaited_user.Real)
    # What is there is not replaced.
    with awaiting("awaited_late"):
        import awaited_late  # type: ignore[import-not-found]
    assert awaited_late is real


def test_nothing_stands_in_for_what_is_not_installed() -> None:
    with awaiting("no_such_module_at_all"), pytest.raises(ImportError):
        import no_such_module_at_all  # type: ignore[import-not-found]  # noqa: F401


@pytest.mark.ci
def test_the_backend_does_without_transformers() -> None:
    pytest.importorskip("transformers")
    code = """
import sys
from overlap_spec.grammar.backends.xgrammar import xgr
assert "transformers" not in sys.modules
from transformers import PreTrainedTokenizerFast
from tokenizers import Tokenizer, models
own = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
info = xgr.TokenizerInfo.from_huggingface(
    PreTrainedTokenizerFast(tokenizer_object=own), stop_token_ids=2
)
assert info.vocab_size == 3, info.vocab_size
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
