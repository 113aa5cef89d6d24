"""Compiles the native part of the package; all else stands in pyproject.toml.

`native/netpath` becomes one shared object in `torchrelay.netpath`. NCCL opens it, and Python does by ctypes, so it is
no module of CPython's: it needs a C compiler and nothing else, and one wheel serves every version of Python. Where
there is no compiler, or no Linux, the package is installed without it, and says so.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

LIBRARY = "torchrelay.netpath.libnccl-net-torchrelay"
FOLDER = Path("native/netpath")
PARTS = ("core", "nccl")
FLAGS = ("-std=c11", "-O2", "-fPIC", "-fvisibility=hidden", "-pthread")
# NCCL closes a plugin whose threads may not have ended yet, so it is never unloaded.
LINK = ("-shared", "-Wl,-z,nodelete", "-Wl,-z,now", "-Wl,-z,defs")
REMEDY = "the package works without its network part; install a C compiler (or name one in CC) and install it again"


def compiler() -> list[str]:
    """The C compiler's command. Raises `CompileError` if there is none."""
    named = shlex.split(os.environ.get("CC", ""))
    if named:
        return named
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    raise CompileError(f"no C compiler: {REMEDY}")


class BuildLibrary(build_ext):
    """Makes a plain shared object, by one call of the compiler."""

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', os.sep)}.so"

    def build_extension(self, ext: Extension) -> None:
        """Compile and link; an error becomes a warning, as the extension is optional."""
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)  # a process may have it open: it must not change under it
        command = [*compiler(), *FLAGS, *LINK, *ext.sources, "-o", str(target)]
        try:
            subprocess.run(command, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise CompileError(f"{shlex.join(command[:1])}: {error}; {REMEDY}") from error


class Wheel(bdist_wheel):
    """A wheel for any Python 3 on this platform."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return ("py3", "none", platform)


def library() -> list[Extension]:
    """What is to be compiled here."""
    if not sys.platform.startswith("linux"):
        warnings.warn(f"the network part is for Linux only, and this is {sys.platform}", stacklevel=1)
        return []
    sources = sorted(str(file) for part in PARTS for file in (FOLDER / part).glob("*.c"))
    headers = sorted(map(str, FOLDER.rglob("*.h")))
    return [Extension(LIBRARY, sources, depends=headers, optional=True)]


parts = library()
setup(
    ext_modules=parts,
    cmdclass={"build_ext": BuildLibrary, **({"bdist_wheel": Wheel} if parts else {})},
)
