"""Script: running the user's program as Python would, in a process that was there before it."""

from __future__ import annotations

import importlib.machinery
import os
import runpy
import sys
from types import ModuleType
from typing import Any

from torchrelay.wire.files.kept import MAIN, digest_of
from torchrelay.worker.source.program import Program


class Main(ModuleType):
    """The script's `__main__`. It lives as long as the process, as Python's does."""


def run(argv: list[str], program: Program | None = None) -> None:
    """Run ("-m", module, ...) or (script, ...). Raises what the script raises.

    `program`: knows what is to be run of a source file that is found on the disk.
    Only now comes the folder onto `sys.path` that Python puts there: a file in it must not pass for a module of ours.
    """
    if argv[:1] == ["-m"]:
        sys.argv = argv[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    path = argv[0]
    sys.argv = list(argv)
    if os.path.isdir(path):
        runpy.run_path(path, run_name="__main__")
        return
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    exec_file(path, program)


def exec_file(path: str, program: Program | None = None) -> None:
    """Run a file as `__main__`. Raises `FileNotFoundError`, `SyntaxError`, and what the script raises."""
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    found = loader.get_data(path)
    source = found
    if program is not None:
        source = program.source(MAIN, path, found)
        program.script = digest_of(source)
    code: Any = compile(source, path, "exec", dont_inherit=True)
    main = Main("__main__")
    main.__dict__.update(__file__=path, __loader__=loader, __builtins__=sys.modules["builtins"], __package__=None)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)
