"""Pages of the site that are not files of this folder: those of the root, the examples, and the command line's help.

mkdocs calls these functions (`hooks:` in mkdocs.yml). Links to files that are no pages become plain code.
"""

from __future__ import annotations

import os
import posixpath
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# The page's name in the site, and the file that it is made of.
ELSEWHERE = {
    "index.md": "README.md",
    "ARCHITECTURE.md": "ARCHITECTURE.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "GLOSSARY.md": "GLOSSARY.md",
    "examples/README.md": "examples/README.md",
}
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made."""
    from mkdocs.structure.files import File

    for name, source in ELSEWHERE.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text()))
    files.append(File.generated(config, "cli.md", content=command_line()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links at pages of the site."""
    source = ELSEWHERE.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return LINK.sub(lambda match: link(match[1], match[2], source, page.file.src_uri), markdown)


def link(text: str, target: str, source: str, page: str) -> str:
    """A link in `source`, as it has to be on this page; its text alone if there is no page for it."""
    path, _, anchor = target.partition("#")
    if "://" in target or not path:
        return f"[{text}]({target})"
    meant = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    known = {file: name for name, file in ELSEWHERE.items()}
    name = known.get(meant, meant.removeprefix("docs/") if meant.startswith("docs/") else "")
    if not name.endswith((".md", ".png", ".svg")):
        return text if text.startswith("`") else f"`{text}`"
    found = posixpath.relpath(name, posixpath.dirname(page) or ".")
    return f"[{text}]({found}{'#' + anchor if anchor else ''})"


def command_line() -> str:
    """The verbs as the registry has them, and what each one's `--help` says."""
    sys.path.insert(0, str(ROOT / "src"))
    from torchrelay.cli.registry import ROWS

    parts = ["# Command line\n", "Generated from the commands' own help.\n"]
    parts += ["| verb | does | changes a run |", "|---|---|---|"]
    for verb in ROWS:
        changes = "yes" if verb.changes else ""
        parts.append(f"| [{verb.name}](#torchrelay-{verb.name}) | {verb.help} | {changes} |")
    parts += [f"\n## torchrelay {verb.name}\n\n```text\n{help_of(verb.name)}\n```" for verb in ROWS]
    return "\n".join(parts) + "\n"


def help_of(verb: str) -> str:
    words = [sys.executable, "-m", "torchrelay.cli.main", verb, "--help"]
    wide = {**os.environ, "COLUMNS": "100", "TERM": "dumb", "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60, env=wide).stdout.strip()
