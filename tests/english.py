"""English of what users read: words that no engineer would write, and sentences that are too long.

python -m tests.english        part of `make check`; exit code 1 and the places, if there are any

Pages and docstrings come to the lists below as they are rewritten, and never leave them.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md", "docs/operate.md", "docs/exit-codes.md", "docs/scripts.md", "docs/first-kill.md",
    "docs/read-an-incident.md", "docs/api.md",
)  # fmt: skip
PUBLIC = ("src/torchrelay/__init__.py", "src/torchrelay/face.py", "src/torchrelay/errors.py")
LONGEST = 30  # words in a sentence
# Each with what is written in its place.
WORDS = {
    "whoever": "the worker, the process, the user",
    "anew": "again",
    "nobody": "no rank, no worker",
    "everybody": "all ranks",
    "somebody": "a worker, an operator",
    "of which": "whose, or a second sentence",
    "by which": "a second sentence",
    "lies": "is",
    "ever": "leave it out",
    "tells of": "shows, names",
    "is to be": "will be, must be",
    "successor": "replacement",
    "newcomer": "replacement",
    "leaver": "outgoing rank",
    "heir": "replacement",
}
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`]*`")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_SENTENCE = re.compile(r"(?<=[.:;!?])\s+")


def prose(text: str) -> Iterator[str]:
    """The paragraphs, list items and table cells of a page, without code."""
    text = _LINK.sub(r"\1", _CODE.sub("code", _FENCE.sub("", text)))
    for block in re.split(r"\n\s*\n|\n(?=[-#|>])", text):
        parts = block.split("|") if block.lstrip().startswith("|") else [block]
        yield from (" ".join(part.split()) for part in parts if part.strip())


def docstrings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
            yield text


def wrong(paragraph: str) -> Iterator[str]:
    """What is wrong with the English of a paragraph."""
    for word, better in WORDS.items():
        if re.search(rf"\b{word}\b", paragraph, re.IGNORECASE):
            yield f"{word!r}: write {better}: {paragraph[:80]}"
    for sentence in _SENTENCE.split(paragraph):
        count = len(sentence.split())
        if count > LONGEST:
            yield f"a sentence of {count} words: {sentence[:80]}"


def main() -> int:
    """Returns the exit code."""
    found = []
    for name in PAGES:
        found += [f"{name}: {what}" for each in prose((ROOT / name).read_text()) for what in wrong(each)]
    for name in PUBLIC:
        for text in docstrings((ROOT / name).read_text()):
            words = [word for each in re.split(r"\n\s*\n", text) for word in wrong(" ".join(each.split()))]
            found += [f"{name}: {what}" for what in words if "a sentence" not in what]
    print("\n".join(found) if found else "the English of all pages is as it should be")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
