"""Skips that hide nothing, and those that do."""

import os
import re
from typing import Any

STRICT = "OVERLAP_SPEC_STRICT_SKIPS"
# Why a test may be skipped where all that is tested should be: the machine lacks an instruction set
# or a device, data that the project does not have, a client that is no part of the extra `dev`, and
# pairs that do not go together.
EXPECTED_SKIPS = re.compile(
    r"(no|needs a|there is a) CUDA device|no AVX512-VNNI|no bfloat16 instructions"
    r"|no native products on this machine|mount: |the system allows too few"
    r"|JSONSchemaBench sample is not here|the JSON Schema Test Suite is not here"
    r"|(anthropic|litellm|guidance|outlines|pydantic-ai) is not installed"
    r"|langchain-openai is missing|litellm answers responses only beside mcp|there is no node"
    r"|(outlines|guidance) asks OpenAI's API|pydantic-ai asks for|anthropic [\d.]+ has no parse"
    r"|node finds no|could not import '(gguf|llama_cpp)'|this instructor has no mode"
    # Where it is needed, `make test-ci` has installed it.
    r"|Ray is not installed"
    r"|the backend refuses this grammar|no step is under way behind the end"
    r"|its delays are idle time too"
)


def check_skip(report: Any) -> None:
    """Where the variable OVERLAP_SPEC_STRICT_SKIPS is set, make a skip for any other reason fail.

    Args:
        report: Pytest's, of a test or of a file.
    """
    if not os.environ.get(STRICT) or not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2].removeprefix("Skipped: ")
    if not EXPECTED_SKIPS.match(reason):
        report.outcome, report.longrepr = "failed", f"an unexpected skip: {reason}"
