"""Lines: which files are the script's own, so that people are told of a line of theirs."""

from __future__ import annotations

import argparse
import collections
import site
import sys
import sysconfig
import threading
import types
from functools import cache
from pathlib import Path
from typing import Any

_OURS = str(Path(__file__).parents[2])
Place = tuple[str, int, str]


def is_library(name: str) -> bool:
    """Whether a file is none of the script's."""
    return name.startswith("<") or any(name.startswith(folder + "/") for folder in _library_folders())


@cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return (_OURS, paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"], *site.getsitepackages())


def place_of(code: types.CodeType) -> Place:
    """Where a function stands: file, first line, qualified name. Codes of two files may be equal; these are not."""
    return code.co_filename, code.co_firstlineno, code.co_qualname


def is_of_the_script(kind: type) -> bool:
    """Whether a class is the script's own, and no library's."""
    found = _of_the_script.get(kind)
    if found is None:
        file = getattr(sys.modules.get(str(kind.__module__)), "__file__", None)
        found = kind in _FILLED or (file is not None and not is_library(file))
        _of_the_script[kind] = found
    return found


def found_in_class(kind: type, name: str) -> Any:
    """What a class has under this name, as it stands there: no descriptor of the script is run. None if nothing."""
    return next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)


_of_the_script: dict[type, bool] = {}
# Only scripts put anything into these.
_FILLED = (
    types.SimpleNamespace,
    argparse.Namespace,
    threading.local,
    collections.UserDict,
    collections.UserList,
    collections.ChainMap,
)
