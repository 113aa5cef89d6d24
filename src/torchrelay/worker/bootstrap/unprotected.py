"""Unprotected: a script that takes an optimizer step and has not joined is told so at once, and not only at its end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchrelay.wire.files.launch import UNPROTECTED


def watch(joined: Callable[[], bool], speaks: Callable[[], bool]) -> None:
    """Look at the first optimizer step. `speaks`: whether this worker's rank is known, and is the one that tells."""
    told = False

    def look(*_: Any) -> None:
        nonlocal told
        if told or joined() or not speaks():
            return
        told = True
        print(UNPROTECTED, file=sys.stderr, flush=True)

    register_optimizer_step_pre_hook(look)
