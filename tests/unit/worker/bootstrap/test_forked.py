"""Children that a script forks: nothing of their parent's threads is waited for in them."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from torchrelay.worker.process_groups.abandon import await_unless_broken


class Thing:
    """Stands for a process group."""


def test_an_error_that_has_been_raised_keeps_nothing_alive() -> None:
    gone: list[weakref.ref[Thing]] = []

    def attempt() -> None:
        thing = Thing()
        gone.append(weakref.ref(thing))

        def work() -> None:
            raise OSError(f"no connection for {thing}")

        await_unless_broken(work, 10.0, "a test")

    gc.disable()
    try:
        with pytest.raises(OSError, match="no connection"):
            attempt()
        for thread in threading.enumerate():
            if thread.name == "torchrelay a test":
                thread.join(10)
        assert gone[0]() is None
    finally:
        gc.enable()
