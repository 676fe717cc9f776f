"""The embedded model: compact JSON objects, one after the other, as its template writes them."""

from overlap_spec.grammar.tools.format import ToolFormat

FORMAT = ToolFormat(
    starts=("{",),
    anywhere=False,
    begin='{"name":"',
    middle='","arguments":',
    end="}",
)
