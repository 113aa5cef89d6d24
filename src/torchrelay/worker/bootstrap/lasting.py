"""Lasting: a rank that outlives a scheduler's SIGTERM needs loader workers that do so, too: the loss of one ends it."""

from __future__ import annotations

import functools

from torch.utils.data._utils import signal_handling

from torchrelay.schedulers import lasting

SETS = "_set_worker_signal_handlers"  # what loader workers call there when they begin


def install() -> None:
    """If this process outlives SIGTERM, have the loader workers that it forks do so; torch sets their handlers."""
    if not lasting.outlives():
        return
    set_handlers = vars(signal_handling)[SETS]

    @functools.wraps(set_handlers)
    def set_all() -> None:
        set_handlers()
        lasting.outlive()

    vars(signal_handling)[SETS] = set_all
