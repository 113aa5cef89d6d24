"""The house: every room is small and says what it is, and no import leads back to where it came from."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from tests import modules_page
from tests.support.house import ROOT, imports

TESTS = Path(__file__).parents[2]
MOST_FILES = 12
# Modules that only one other imports: under 50 is the aim. Each is a file more to open on one's way in, so what tells
# one story with its importer stands beside it. What is lower than this number is to become this number.
MOST_WITH_ONE_IMPORTER = 58
ROOMS = sorted({path.parent for path in ROOT.rglob("*.py")})


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Modules that lead back to themselves: what is left when all are taken away that import none of the others."""
    left = {name: set(others) for name, others in graph.items()}
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    return [sorted(left)] if left else []


def with_one_importer(graph: dict[str, set[str]]) -> list[str]:
    """Modules that exactly one other imports; packages and what is run as a command or `python -m` do not count."""
    importers = Counter(other for others in graph.values() for other in others)
    return sorted(name for name in importers if importers[name] == 1 and is_module(name) and name not in commands())


def commands() -> set[str]:
    """The modules behind the commands that are installed."""
    project = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text())["project"]
    return {entry.partition(":")[0] for entry in project["scripts"].values()}


def is_module(name: str) -> bool:
    return (ROOT.parent / f"{name.replace('.', '/')}.py").is_file() and not name.endswith(".__main__")


def test_few_modules_have_one_importer_only() -> None:
    found = with_one_importer(imports())
    assert len(found) <= MOST_WITH_ONE_IMPORTER, found


def test_one_importer_is_found() -> None:
    once, twice, room = "torchrelay.errors", "torchrelay.face", "torchrelay.cli"
    assert with_one_importer({"a": {once, twice, room}, "b": {twice, "torchrelay.simulation.__main__"}}) == [once]


def test_no_test_imports_another() -> None:
    files = [path for folder in ("unit", "process", "jobs", "soak") for path in (TESTS / folder).rglob("test_*.py")]
    assert len(files) > 200
    found = {path.name for path in [*files, *(TESTS / "support").rglob("*.py")] for name in from_tests(path)}
    assert not found, found


def from_tests(path: Path) -> list[str]:
    """The test modules that a module imports."""
    named = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    modules = [f"{node.module}.{alias.name}" for node in named for alias in node.names]
    return [name for name in modules if re.search(r"^tests\..*\btest_", name)]


def test_no_import_leads_back() -> None:
    assert circles(imports()) == []


def test_a_circle_would_be_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c", "d"]]


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(ROOT.parent)))
def test_a_room_is_small_and_says_what_it_is(room: Path) -> None:
    files = [path for path in room.iterdir() if path.is_file() and path.name not in ("py.typed", "__main__.py")]
    files = [path for path in files if path.suffix != ".so"]
    assert len(files) <= MOST_FILES + 1, "so many files, beside its __init__"
    first = ast.get_docstring(ast.parse((room / "__init__.py").read_text()))
    assert first
    assert first.splitlines()[0].endswith("."), "a sentence"


def test_the_architecture_names_every_room() -> None:
    text = (ROOT.parents[1] / "ARCHITECTURE.md").read_text()
    missing = [room for room in ROOMS if f"{room.relative_to(ROOT)}/" not in text and room != ROOT]
    assert missing == []


def test_the_page_of_modules_is_as_the_code_says() -> None:
    assert modules_page.PAGE.read_text() == modules_page.made()


def test_every_module_has_a_first_sentence_and_a_row() -> None:
    rows = [line for line in modules_page.made().splitlines() if line.startswith("| `")]
    modules = [path for path in ROOT.rglob("*.py") if path.name != "__init__.py" or path.parent == ROOT]
    assert len(rows) == len(modules)
    assert [row for row in rows if row.endswith("| . |")] == []


def test_every_dependency_is_used_and_nothing_else_is_imported() -> None:
    project = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["plot"]]
    names = {re.split(r"[^a-z0-9_-]", one)[0] for one in declared}
    assert others_imported() == names


def others_imported() -> set[str]:
    """The packages that the source imports and that come with neither Python nor torchrelay."""
    found = set[str]()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return {name for name in found if name not in sys.stdlib_module_names and name != ROOT.name}
