"""Entropy: the random state with which an unseeded script begins belongs to the rank, not to the process.

Whoever takes a rank over draws the same: an unseeded `random_split` gives it the data of its predecessor. Before the
rank is known all workers of a job begin alike. When it is known, what nobody has touched since gets a seed of the rank:
as under torchrun, ranks draw differently. What the script has seeded, or drawn from, stays as it is.
"""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch

BYTES = 8


class Entropy:
    """Of one worker: torch's generator for the CPU, Python's and NumPy's."""

    def __init__(self, secret: bytes) -> None:
        """Seed all three alike in all workers of a job. `secret`: the job's, so that two jobs draw differently."""
        self._secret = secret
        self._seed_all("a worker")
        self._first = self._states()

    def belong_to(self, rank: int) -> None:
        """The rank is known: give it its own first state, where nothing has been drawn or seeded since."""
        now = self._states()
        for name, state in self._first.items():
            if now.get(name) == state:
                self._seed(name, f"rank {rank}")

    def _seed_all(self, whose: str) -> None:
        for name in ("torch", "python", "numpy"):
            self._seed(name, whose)

    def _seed(self, name: str, whose: str) -> None:
        told = hashlib.sha256(self._secret + f"|first random state|{name}|{whose}".encode()).digest()
        seed = int.from_bytes(told[:BYTES], "big")
        numpy = sys.modules.get("numpy")
        if name == "torch":
            torch.default_generator.manual_seed(seed)
        elif name == "python":
            random.seed(seed)
        elif numpy is not None:
            numpy.random.seed(seed & 0xFFFFFFFF)

    def _states(self) -> dict[str, Any]:
        states: dict[str, Any] = {
            "torch": bytes(torch.default_generator.get_state().numpy()),
            "python": random.getstate(),
        }
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            kind, keys, *rest = numpy.random.get_state()
            states["numpy"] = (kind, bytes(keys), *rest)
        return states
