"""A call that blocks where nothing can wake it is left behind, and what it brings later is dropped."""

from __future__ import annotations

import threading

import pytest

from tests.scripts import groups_actions as acts
from torchrelay.worker.process_groups import abandon
from torchrelay.worker.process_groups.abandon import Abandoned, await_unless_broken


def test_a_call_gives_its_result_or_its_error() -> None:
    assert await_unless_broken(lambda: 7, 5.0, "counting") == 7
    with pytest.raises(ZeroDivisionError):
        await_unless_broken(lambda: 1 / 0, 5.0, "dividing")


def test_a_call_asks_no_name_server() -> None:
    assert acts.name_servers() > 0
    assert await_unless_broken(acts.name_servers, 5.0, "looking") == 0
    assert acts.name_servers() > 0


def test_a_call_that_takes_too_long_is_left_behind() -> None:
    never = threading.Event()
    with pytest.raises(Abandoned, match=r"waiting took longer than 0.05 s"):
        await_unless_broken(never.wait, 0.05, "waiting")
    never.set()


def test_a_call_is_left_behind_when_it_is_broken() -> None:
    inside, never = threading.Event(), threading.Event()

    def block() -> None:
        inside.set()
        never.wait()

    def break_it() -> None:
        inside.wait()
        abandon.break_all()

    threading.Thread(target=break_it).start()
    with pytest.raises(Abandoned, match="waiting was interrupted"):
        await_unless_broken(block, 30.0, "waiting")
    never.set()


def test_what_a_call_brings_after_it_was_left_behind_is_dropped() -> None:
    class Connection:
        closed = threading.Event()

        def __del__(self) -> None:
            self.closed.set()

    go_on = threading.Event()

    def connect() -> Connection:
        go_on.wait()
        return Connection()

    with pytest.raises(Abandoned):
        await_unless_broken(connect, 0.05, "connecting")
    go_on.set()
    assert Connection.closed.wait(10)
