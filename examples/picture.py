"""Draws docs/tokens.svg, the picture of a chat's coloured tokens: `make picture`."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

from overlap_spec import Engine, SamplingParams
from overlap_spec.cli.chat import Chat
from overlap_spec.cli.request import ConstraintFlags
from overlap_spec.cli.terminal import legend

ROOT = Path(__file__).parent.parent
SCHEMA = "examples/person.schema.json"
SAID = "Maria Lopez is 34 and lives in Lisbon."
# Without the fonts that rich would fetch from elsewhere.
FORMAT = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
FORMAT = FORMAT.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")


def draw(engine: Engine) -> str:
    """A chat of one answer under a schema, as SVG."""
    console = Console(
        record=True,
        width=84,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        highlight=False,
    )
    console.print(Text(f"$ overlap-spec chat --schema {SCHEMA}"))
    console.print(legend())
    console.print(Text(f"> {SAID}", "bold"))
    constraint = ConstraintFlags(schema=str(ROOT / SCHEMA))
    chat = Chat(engine, None, constraint, SamplingParams(), None, console)
    chat.answer(SAID)
    return console.export_svg(
        title="overlap-spec", theme=DIMMED_MONOKAI, code_format=FORMAT, unique_id="tokens"
    )


def main() -> None:
    """Write the picture to the file that is named, or to docs/tokens.svg."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "tokens.svg"
    with Engine() as engine:
        # The first answer is slower: its figures would tell of the start.
        draw(engine)
        path.write_text(draw(engine))


if __name__ == "__main__":
    main()
