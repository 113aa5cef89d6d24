"""What tests of native house share."""

from __future__ import annotations

from pathlib import Path

from tests.support.c_files import CFile, read

ROOT = Path(__file__).parents[2]
CORE = ROOT / "native" / "netpath" / "core"
FACE = "netpath.h"  # what the library offers to others; several files of the core define its functions

Files = dict[str, CFile]


def core() -> Files:
    """The core's files and the library's face, read."""
    paths = [*CORE.glob("*.[ch]"), CORE.parent / FACE]
    return {path.name: read(path.read_text()) for path in paths}


def sources(files: Files) -> Files:
    return {name: file for name, file in files.items() if name.endswith(".c")}


def owners(files: Files) -> dict[str, str]:
    """By function or variable that is not static, the C file that defines it."""
    return {each: name for name, file in sources(files).items() for each in file.defined}


def uses(files: Files) -> dict[str, set[str]]:
    """By C file, the functions and variables of other C files that it uses."""
    owned = owners(files)
    return {
        name: {each for each in file.used & owned.keys() - file.private if owned[each] != name}
        for name, file in sources(files).items()
    }
