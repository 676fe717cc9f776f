"""Mistral from tokenizer version 11 on: name and arguments, each after a marker."""

from overlap_spec.grammar.tools.format import ToolFormat

FORMAT = ToolFormat(
    starts=("[TOOL_CALLS]",),
    anywhere=True,
    begin="[TOOL_CALLS]",
    middle="[ARGS]",
    end="",
    markers=("[TOOL_CALLS]", "[ARGS]"),
    signs=("[TOOL_CALLS]", "[ARGS]"),
)
