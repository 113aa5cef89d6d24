"""docs/a-kill.md: every place in the code that it names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "a-kill.md"
NAMED = sorted(set(re.findall(r"`([\w/]+\.py)(?::(\w+))?`", PAGE.read_text())))


@pytest.mark.parametrize(("path", "function"), NAMED)
def test_what_it_names_is_there(path: str, function: str) -> None:
    tree = ast.parse((ROOT / "src" / "torchrelay" / path).read_text())
    if function:
        assert function in {
            node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
