"""Lines: which files are the script's own, so that people are told of a line of theirs."""

from __future__ import annotations

import site
import sysconfig
from functools import cache
from pathlib import Path

_OURS = str(Path(__file__).parent.parent)


def is_library(name: str) -> bool:
    """Whether a file is none of the script's."""
    return name.startswith("<") or any(name.startswith(folder + "/") for folder in _library_folders())


@cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return (_OURS, paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"], *site.getsitepackages())
