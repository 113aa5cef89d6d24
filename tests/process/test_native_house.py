"""The house of the network core: no C file leads back to where it came from, and each includes exactly what it uses."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.c_files import CFile
from tests.support.native_house import CORE, Files, core, sources, uses


@pytest.mark.skipif(not (shutil.which("cc") and shutil.which("nm")), reason="no C compiler (cc) or no nm")
def test_what_is_read_is_what_the_linker_sees(tmp_path: Path) -> None:
    files = core()
    subprocess.run(["cc", "-std=c11", "-c", *map(str, CORE.glob("*.c"))], cwd=tmp_path, check=True)
    seen: Files = {}
    for name in sources(files):
        listed = subprocess.run(
            ["nm", "--format=posix", name.replace(".c", ".o")], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout
        symbols = [line.split()[:2] for line in listed.splitlines()]
        seen[name] = CFile(
            defined={symbol for symbol, kind in symbols if kind in "TDBR"},
            used={symbol for symbol, kind in symbols if kind == "U"},
        )
    assert {name: file.defined for name, file in seen.items()} == {
        name: file.defined for name, file in sources(files).items()
    }
    assert uses(seen) == uses(files)
