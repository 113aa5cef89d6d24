"""What tests of house share."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2] / "src" / "torchrelay"


@cache
def imports() -> dict[str, set[str]]:
    """By module, the modules of ours that it imports anywhere in its text, for its types alone, too."""
    files = {name_of(path): path for path in ROOT.rglob("*.py")}
    return {name: set(imported(path, files)) - {name} for name, path in files.items()}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path, files: dict[str, Path]) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            inner = [f"{module}.{alias.name}" for alias in node.names]
            found += [name for name in inner if name in files]
            if not all(name in files for name in inner):
                found.append(module)
    return [name for name in found if name in files]
