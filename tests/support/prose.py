"""How the documents read: words a sentence by page, and words that are private to the project.

``python -m tests.support.prose [docs]`` prints both; code, tables and headings are no prose.
"""

import re
import sys
from pathlib import Path

# What a reader who knows vLLM would have to look up; the glossary may have them.
PRIVATE = frozenset(("lane", "tier", "graft", "fate", "exposed", "room", "law"))
FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2[^\n]*$", re.DOTALL | re.MULTILINE)
ASIDE = re.compile(r"`[^`\n]+`|<[^>\n]+>|\]\([^)\s]*\)|\[\^?[^\]]*\]:.*")
END = re.compile(r"[.!?:;](?=[\s)\"'*]|$)")


def prose(text: str) -> str:
    """What of a page's Markdown is sentences; a code span counts as a word."""
    lines = FENCE.sub("", text).splitlines()
    kept = [line for line in lines if not line.lstrip().startswith(("#", "|", "!", ":::", "<"))]
    # A paragraph and an entry of a list end a sentence.
    whole = "\n".join(re.sub(r"^\s*([-*+]|\d+\.)\s+", "\n\n", line) for line in kept)
    ended = "\n".join(part if END.search(part[-1:]) else f"{part}." for part in _parts(whole))
    return ASIDE.sub(lambda span: "code" if span[0].startswith("`") else " ", ended)


def _parts(text: str) -> list[str]:
    return [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]


def sentence_words(text: str) -> list[int]:
    """Words of each sentence of a page."""
    parts = re.split(r"(?<=[.!?])\s+", prose(text))
    counts = [len(re.findall(r"[A-Za-z0-9_][\w'’.,-]*", part)) for part in parts]
    return [count for count in counts if count]


def private_words(text: str) -> list[str]:
    """Private words of a page's prose, in their order."""
    words = re.findall(r"[a-z_]+", prose(text).lower())
    return [word for word in words if word in PRIVATE or word.removesuffix("s") in PRIVATE]


def main(folder: Path) -> None:
    """Print a line a page, and the mean of all."""
    every: list[int] = []
    for page in sorted(folder.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        counts = sentence_words(text)
        every += counts
        mean = sum(counts) / max(1, len(counts))
        private = " ".join(private_words(text))
        print(f"{page.name:22} {sum(counts):6} words, {mean:5.1f} a sentence  {private}".rstrip())
    print(f"{'all':22} {sum(every):6} words, {sum(every) / max(1, len(every)):5.1f} a sentence")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
