"""What work costs, counted: the same on every machine, however busy."""

import gc
import sys
from collections.abc import Callable
from typing import Any


def lines_run(work: Callable[[], object]) -> int:
    """Lines of Python that run in this thread, loops as often as they go round."""
    count = 0

    def told(_: Any, event: str, __: Any) -> Any:
        nonlocal count
        count += event == "line"
        return told

    before = sys.gettrace()
    # What is collected meanwhile, and who is called for it, is no part of the work.
    gc.disable()
    sys.settrace(told)
    try:
        work()
    finally:
        sys.settrace(before)
        gc.enable()
    return count
