"""Mutants of what proves a replacement: each takes one proof out of the worker, and its tests must notice.

python -m tests.mutants.proofs            all of them
python -m tests.mutants.proofs code       those whose names begin like that

A mutant is torchrelay with one text replaced, in a folder that Python comes to first: workers run it, too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.mutant import Mutant
from tests.mutants.taken_out import PROOFS

HERE = Path(__file__).parents[2]
SOURCE = HERE / "src" / "torchrelay"
FAILED = 1  # pytest's code for tests that failed; others say that it could not run them


def plant(mutant: Mutant, folder: Path) -> None:
    """Put torchrelay, changed, into a folder. Raises `ValueError` if the text to be replaced is not there once."""
    shutil.copytree(SOURCE, folder / "torchrelay", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "torchrelay" / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant}: its text is {text.count(mutant.old)} times in {mutant.file}: {mutant.old!r}")
    path.write_text(text.replace(mutant.old, mutant.new))


def survives(mutant: Mutant, folder: Path) -> str:
    """Why a mutant is still alive after its tests; empty if they noticed."""
    plant(mutant, folder)
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "", "-p", "no:cacheprovider", *mutant.tests]
    done = subprocess.run(
        words, cwd=HERE, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=280
    )
    if done.returncode == FAILED:
        return ""
    return f"{' '.join(mutant.tests)}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}"


def main(beginnings: Sequence[str]) -> int:
    """Let all of them meet their tests. Returns the exit code: 1 if one survives."""
    alive = 0
    for mutant in PROOFS:
        if beginnings and not mutant.name.startswith(tuple(beginnings)):
            continue
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="torchrelay-mutant-") as folder:
            why = survives(mutant, Path(folder))
        alive += bool(why)
        print(f"{'SURVIVES' if why else 'noticed':9} {mutant} ({time.monotonic() - begin:.0f} s) {why}", flush=True)
    print(f"{alive} survive")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
