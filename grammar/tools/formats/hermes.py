"""Hermes, Qwen 2.5, Qwen 3: one JSON object per call between tags, after any text."""

from overlap_spec.grammar.tools.format import ToolFormat

FORMAT = ToolFormat(
    starts=("<tool_call>",),
    anywhere=True,
    begin='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    end="}\n</tool_call>",
    separator="\n",
    markers=("<tool_call>", "</tool_call>"),
    signs=('<tool_call>{"name":',),
)
