"""Lasting: a rank that outlives a scheduler's SIGTERM needs loader workers that do so, too: the loss of one ends it."""

from __future__ import annotations

import functools
import logging

from torch.utils.data._utils import signal_handling

from torchrelay.schedulers import kinship, lasting

log = logging.getLogger(__name__)

SETS = "_set_worker_signal_handlers"  # what loader workers call there when they begin


def install() -> None:
    """If this process outlives SIGTERM, have the loader workers that it forks do so; torch sets their handlers.

    Their parent's ends them, as ever. Where that cannot be had they end by any: a rank that is told to go by Slurm is
    lost to the parking then; but one that outlives its script, as it waits for its loader's workers, is worse.
    """
    if not lasting.outlives():
        return
    try:
        kinship.loaded()
    except OSError as error:
        log.warning("workers of a DataLoader end by a scheduler's SIGTERM, and their ranks with them: %s", error)
        return
    set_handlers = vars(signal_handling)[SETS]

    @functools.wraps(set_handlers)
    def set_all() -> None:
        set_handlers()
        lasting.outlive(but_for_parent=True)

    vars(signal_handling)[SETS] = set_all
