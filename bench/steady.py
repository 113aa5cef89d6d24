"""Steady: what is the same in the environment of all jobs that a bench compares."""

from __future__ import annotations

import os

# glibc gives the end of a heap back to the kernel, and large blocks at once; the kernel clears pages anew. How often
# depends on what happens to lie at the end: jobs of the same code differ by 800 to 3,400 page faults a step and rank,
# which is 2 % of its time and more. A process that keeps what it has leaves what is to be measured. (mallopt(3);
# 32 MiB is the most that all versions take as the threshold of a block.)
KEPT = {"MALLOC_TRIM_THRESHOLD_": str(1 << 32), "MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TOP_PAD_": str(1 << 26)}
ALIKE = {"OMP_NUM_THREADS": "1", **KEPT}


def environment(**more: str) -> dict[str, str]:
    """Of a job: ours, what is the same for all, and `more`."""
    return {**os.environ, **ALIKE, **more}
