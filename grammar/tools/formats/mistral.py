"""Mistral before tokenizer version 11: one JSON list of calls after a marker."""

from overlap_spec.grammar.tools.format import ToolFormat

FORMAT = ToolFormat(
    starts=("[TOOL_CALLS]",),
    anywhere=True,
    begin='{"name": "',
    middle='", "arguments": ',
    end="}",
    # With and without the space: the templates of the v3 and the Tekken tokenizers differ.
    openings=("[TOOL_CALLS] [", "[TOOL_CALLS]["),
    separator=", ",
    close="]",
    markers=("[TOOL_CALLS]",),
    signs=("[TOOL_CALLS]",),
)
