"""docs/modules.md: every module with its first sentence, in the order in which packages and rooms may import.

python -m tests.modules_page            is it as the code says? part of `make check`
python -m tests.modules_page --write    make it so; part of `make fix`
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "torchrelay"
PAGE = ROOT / "docs" / "modules.md"
HEAD = """# Modules

Generated from the modules' own first sentences (`make fix`). Packages and rooms are in the order of their layers: each
may import what comes after it, never what comes before. `make check` enforces this; names side by side in one layer do
not import one another.
"""


def contracts() -> dict[str, list[list[str]]]:
    """By the package that they are about, the layers of each contract, highest first."""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layered = [contract for contract in told if contract["type"] == "layers"]
    return {
        contract.get("containers", ["torchrelay"])[0]: [
            [name.strip().removeprefix("torchrelay.") for name in layer.split("|")] for layer in contract["layers"]
        ]
        for contract in layered
    }


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring, without its name."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    line = " ".join(text.split("\n\n")[0].split())
    name, colon, rest = line.partition(": ")
    if colon and len(name.split()) <= 3:
        line = rest[:1].upper() + rest[1:]
    return line.split(". ")[0].rstrip(".").replace("|", "\\|") + "."


def rooms(package: Path, layers: list[list[str]]) -> Iterator[tuple[str, list[Path]]]:
    """The rooms of a package in the order of their layers, each with its modules; its own modules come first."""
    own = sorted(path for path in package.glob("*.py") if path.name != "__init__.py")
    yield "", own
    order = [name for layer in layers for name in layer]
    found = sorted((path for path in package.iterdir() if (path / "__init__.py").exists()), key=lambda path: path.name)
    for room in sorted(found, key=lambda path: order.index(path.name) if path.name in order else len(order)):
        yield room.name, sorted(path for path in room.rglob("*.py") if path.name != "__init__.py")


def made() -> str:
    """The page as it has to be."""
    known = contracts()
    parts = [HEAD]
    for layer in [["__init__"], *known["torchrelay"]]:
        for name in layer:
            package = SOURCE / name
            if name == "__init__":
                tops = sorted(path for path in SOURCE.glob("*.py"))
                parts += ["## torchrelay\n", *rows(tops)]
                continue
            side = [other for other in layer if other != name]
            beside = f" Beside it: {', '.join(f'`{other}`' for other in side)}." if side else ""
            parts.append(f"## {name}\n\n{first_sentence(package / '__init__.py')}{beside}\n")
            for room, modules in rooms(package, known.get(f"torchrelay.{name}", [])):
                if room:
                    parts.append(f"### {name}/{room}\n\n{first_sentence(package / room / '__init__.py')}\n")
                parts += rows(modules)
    return "\n".join(parts).rstrip() + "\n"


def rows(modules: list[Path]) -> list[str]:
    if not modules:
        return []
    lines = ["| module | is |", "|---|---|"]
    lines += [f"| `{path.stem}` | {first_sentence(path)} |" for path in modules]
    return ["\n".join(lines) + "\n"]


def main() -> int:
    """Returns the exit code."""
    if "--write" in sys.argv[1:]:
        PAGE.write_text(made())
        return 0
    if not PAGE.exists() or PAGE.read_text() != made():
        print("docs/modules.md is not as the code says: run `make fix`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
