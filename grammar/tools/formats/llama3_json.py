"""Llama 3.1 and later: the reply is JSON objects and nothing else, separated by semicolons."""

from overlap_spec.grammar.tools.format import ToolFormat

FORMAT = ToolFormat(
    starts=("{", "<|python_tag|>"),
    anywhere=False,
    begin='{"name": "',
    middle='", "parameters": ',
    end="}",
    openings=("", "<|python_tag|>"),
    separator="; ",
    markers=("<|python_tag|>",),
    signs=('{"name":functionname,"parameters":',),
)
