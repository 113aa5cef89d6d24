"""What every bench shares: the machine's description, statistics, and the last line of JSON."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path


def machine() -> dict[str, object]:
    """The machine a figure was measured on."""
    model = "unknown"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else platform.machine()
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": version("torch"),
        "gpu": None,
    }


def upper_bound_of_median(values: Sequence[float]) -> float:
    """The upper 95 % bound (one-sided) of the median, by order statistics: no assumption on how the values scatter.

    For n values it is the k-th smallest, with the smallest k for which P(Binomial(n, 1/2) < k) is at least 0.95.
    """
    ordered = sorted(values)
    below = 0.0
    for k in range(len(ordered)):
        below += math.comb(len(ordered), k) / 2 ** len(ordered)
        if below >= 0.95:
            return ordered[k]
    return ordered[-1] if ordered else float("nan")


def progress(text: str) -> None:
    """One line of progress; over itself on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


def finish(bench: str, figures: Mapping[str, object], **more: object) -> None:
    """Print the result: a table for people, then one line of JSON."""
    if sys.stderr.isatty():
        print(file=sys.stderr)
    for name, value in figures.items():
        shown = f"{value:.4g}" if isinstance(value, float) else value
        print(f"{name:32} {shown}")
    print(json.dumps({"bench": bench, "figures": dict(figures), "machine": machine(), **more}))
