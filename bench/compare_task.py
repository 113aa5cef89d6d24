"""What is trained in `compare` and `turns`: the models, and the text."""

from __future__ import annotations

import sysconfig
from pathlib import Path

MODELS = {"gpt": ("small", 4), "small": ("tiny", 2)}  # size in examples/train_gpt.py, windows in a batch
# As many as a job of the field test that the rate of faults is scaled to; one of `small` takes a sixth of the time.
STEPS = {"gpt": 3000, "small": 6000}
CORPUS_BYTES = 16_000_000


def write_corpus(path: Path) -> Path:
    """The source text of the standard library, as in the example, up to 16 MB: the same for all environments."""
    root, size = Path(sysconfig.get_paths()["stdlib"]), 0
    with path.open("wb") as file:
        for source in sorted(root.rglob("*.py")):
            if {"site-packages", "dist-packages"}.isdisjoint(source.parts) and size < CORPUS_BYTES:
                size += file.write(source.read_bytes())
    return path
