"""The house is kept tidy: short functions, short files, a first sentence in every module, names that say something."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FUNCTION_LINES = 50
FILE_LINES = 500
# Words that name nothing: whatever such a module holds has a better name.
EMPTY = re.compile(r"(^|_)(utils?|helpers?|managers?|misc|common|stuff|base|handlers?|things?)(_|$)", re.IGNORECASE)

# Exceptions, each with its reason. A line that is not needed any more fails too.
LONG_FUNCTIONS: dict[str, str] = {
    "examples/train_gpt.py:main": "a training script is read from the top to the bottom, as its users write theirs",
}
LONG_FILES: dict[str, str] = {}
EMPTY_NAMES: dict[str, str] = {}
SKIP = "# fmt: " + "skip"  # what follows the formatter nowhere but in tables
# Files in which a few other statements are laid out by hand: each is at its limit of lines.
LAID_OUT = {
    "src/torchrelay/cli/forecasts/cost.py", "src/torchrelay/cli/launch/run.py",
    "src/torchrelay/orchestrator/core/service.py", "src/torchrelay/worker/bootstrap/run.py",
    "src/torchrelay/worker/step/calls.py",
    "tests/cases/own-data/train.py", "tests/unit/protocol/test_decisions.py",
}  # fmt: skip


def modules() -> list[Path]:
    folders = ("src", "tests", "bench", "examples")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def native() -> list[Path]:
    return sorted(path for path in (ROOT / "native").rglob("*.[ch]"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST, outer: str = "") -> Iterator[tuple[str, Function]]:
    """All functions with their qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function | ast.ClassDef):
            name = f"{outer}.{node.name}" if outer else node.name
            if not isinstance(node, ast.ClassDef):
                yield name, node
            yield from functions(node, name)
        else:
            yield from functions(node, outer)


def long_functions(source: str, limit: int = FUNCTION_LINES) -> dict[str, int]:
    """Functions over the limit and how many lines they have; decorators do not count."""
    lengths = {name: (node.end_lineno or 0) - node.lineno + 1 for name, node in functions(ast.parse(source))}
    return {name: lines for name, lines in lengths.items() if lines > limit}


def opens_with_a_sentence(source: str) -> bool:
    """Whether the module says what it is before anything else."""
    first = (ast.get_docstring(ast.parse(source)) or "").partition("\n\n")[0].strip()
    return first.endswith((".", ":", "?")) and len(first.split()) >= 2


def test_functions_are_short() -> None:
    found = {f"{name_of(path)}:{name}" for path in modules() for name in long_functions(path.read_text())}
    assert found == set(LONG_FUNCTIONS)


def test_files_are_short() -> None:
    files = [*modules(), *native()]
    found = {name_of(path) for path in files if len(path.read_text().splitlines()) > FILE_LINES}
    assert found == set(LONG_FILES)


def lines_of_tables(source: str) -> set[int]:
    """The last lines of assignments of literals, and of decorators, which hold the tables of tests."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Function | ast.ClassDef):
            found |= {decorator.end_lineno or 0 for decorator in node.decorator_list}
        if isinstance(node, ast.Assign | ast.AnnAssign):
            value = node.value
            inner = value.func if isinstance(value, ast.Call) else value
            if isinstance(inner, ast.Tuple | ast.List | ast.Dict | ast.Set | ast.Name):
                found.add(node.end_lineno or 0)
    return found


def test_only_tables_are_laid_out_by_hand() -> None:
    found = set()
    for path in modules():
        source = path.read_text()
        if SKIP in source and name_of(path) not in LAID_OUT:
            skips = {at for at, line in enumerate(source.splitlines(), 1) if SKIP in line}
            found |= {f"{name_of(path)}:{at}" for at in skips - lines_of_tables(source)}
    assert found == set()


def test_every_module_says_what_it_is() -> None:
    assert [name_of(path) for path in modules() if not opens_with_a_sentence(path.read_text())] == []


def test_names_say_something() -> None:
    found = {name_of(path) for path in modules() if any(EMPTY.search(part.removesuffix(".py")) for part in parts(path))}
    assert found == set(EMPTY_NAMES)


def parts(path: Path) -> tuple[str, ...]:
    return path.relative_to(ROOT).parts


# ---------------------------------------------------------------- the tests of these tests


@pytest.mark.parametrize(("lines", "long"), [(50, False), (51, True)])
def test_the_limit_bites(lines: int, long: bool) -> None:
    body = "\n".join("        x = 1" for _ in range(lines - 1))
    source = f"class A:\n    @property\n    def f(self):\n{body}\n"
    assert list(long_functions(source)) == (["A.f"] if long else [])


@pytest.mark.parametrize(
    ("source", "good"),
    [
        ('"""Says it."""', True),
        ('"""Says it:\n\n  a\n"""', True),
        ('"""words"""', False),
        ("x = 1", False),
        ("", False),
    ],
)
def test_a_first_sentence_is_one(source: str, good: bool) -> None:
    assert opens_with_a_sentence(source) is good


@pytest.mark.parametrize("name", ["utils", "string_utils", "Helper", "job_manager", "base"])
def test_empty_names_are_seen(name: str) -> None:
    assert EMPTY.search(name)


@pytest.mark.parametrize("name", ["baseline", "futile", "commons_sense", "database", "handle"])
def test_other_names_are_not(name: str) -> None:
    assert not EMPTY.search(name)
