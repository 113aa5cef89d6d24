"""What tests of simulation share."""

from __future__ import annotations

import hashlib

from torchrelay.simulation.world import run_seed


def fingerprint(seeds: range) -> str:
    """A digest of the stories of some seeds."""
    digest = hashlib.sha256()
    for seed in seeds:
        digest.update("\n".join(run_seed(seed, story=True).story).encode())
    return digest.hexdigest()
