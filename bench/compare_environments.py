"""Environments: each rival in a virtual environment of its own, pinned, made once and kept.

An environment that was made by another list of packages, or for another Python, is made anew.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

TORCH = "torch==2.13.0"
# By name: the lists of what pip installs, one call each, and what must be importable afterwards. Versions are pinned;
# NVRx asks for more than its in-process part needs, so it comes without what it depends on.
WANTED: dict[str, tuple[tuple[tuple[str, ...], ...], str]] = {
    "torchft": (((TORCH, "numpy==2.4.6", "torchft-nightly==2026.10.26"),), "torchft"),
    "nvrx": (
        (
            (TORCH, "numpy==2.4.6", "nvidia-ml-py==13.615.71", "psutil==7.2.2", "pyyaml==6.0.3", "defusedxml==0.7.1",
             "packaging==26.3"),
            ("--no-deps", "nvidia-resiliency-ext==0.4.1"),
        ),
        "nvidia_resiliency_ext.inprocess",
    ),
}  # fmt: skip
CACHE = Path.home() / ".cache" / "torchrelay-bench"
PATIENCE_S = 1200


class NotInstalled(RuntimeError):
    """A rival cannot be had here; the message says why."""


def python_of(name: str, folder: Path, say: Callable[[str], None]) -> Path:
    """The interpreter of a rival's environment below `folder`, made if need be. Raises `NotInstalled`."""
    calls, module = WANTED[name]
    home = folder / name
    python, ready = home / "bin" / "python", home / "torchrelay-bench.ready"
    wanted = hashlib.sha256(json.dumps([calls, sys.version]).encode()).hexdigest()
    if ready.exists() and ready.read_text() == wanted and python.exists():
        return python
    shutil.rmtree(home, ignore_errors=True)
    say(f"{name}: making {home} (once; some minutes)")
    try:
        run([sys.executable, "-m", "venv", str(home)], name)
        for words in calls:
            run([str(python), "-m", "pip", "install", "--disable-pip-version-check", "-q", *words], name)
        run([str(python), "-W", "ignore", "-c", f"import {module}"], name)
        ready.write_text(wanted)
    finally:
        if not ready.exists():  # half of one is some GB that nobody would use
            shutil.rmtree(home, ignore_errors=True)
    return python


def run(words: list[str], name: str) -> None:
    """Raises `NotInstalled` with the end of what was said."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstalled(f"{name}: {' '.join(words[1:4])}: {error}") from error
    if done.returncode:
        said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise NotInstalled(f"{name}: {' '.join(words[1:6])}: {' / '.join(said[-3:])[:400]}")


def packages(python: Path) -> list[str]:
    """What is installed there, as pip tells; empty if it tells nothing."""
    words = [str(python), "-m", "pip", "freeze", "--disable-pip-version-check"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    return [line for line in done.stdout.splitlines() if "==" in line or " @ " in line]
