"""Python's collector: it is off while a job recovers, not for hours, and never when nobody looks after it any more."""

from __future__ import annotations

import asyncio
import gc

import pytest

from torchrelay.orchestrator import __main__ as orchestrator


class Service:
    """What the collector is to know of one."""

    def __init__(self) -> None:
        self.busy, self.news = False, asyncio.Event()

    def turn(self, *, busy: bool) -> None:
        self.busy = busy
        news, self.news = self.news, asyncio.Event()
        news.set()


async def comes(wanted: bool) -> None:
    async with asyncio.timeout(5):
        while gc.isenabled() is not wanted:
            await asyncio.sleep(0)


def test_it_is_off_while_a_job_recovers_and_on_after_that() -> None:
    async def go() -> None:
        service = Service()
        task = asyncio.create_task(orchestrator.collect_in_peace(service))  # type: ignore[arg-type]
        await comes(True)
        for busy in (True, False, True):
            service.turn(busy=busy)
            await comes(not busy)
        task.cancel()
        await asyncio.wait([task])
        assert gc.isenabled()

    asyncio.run(go())


def test_a_job_that_waits_for_long_is_collected_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orchestrator, "SPARED_S", 0.2)
    monkeypatch.setattr(orchestrator, "LOOK_S", 0.01)

    async def go() -> None:
        service = Service()
        service.busy = True
        task = asyncio.create_task(orchestrator.collect_in_peace(service))  # type: ignore[arg-type]
        await comes(False)
        await comes(True)
        service.turn(busy=True)
        await asyncio.sleep(0.05)
        assert gc.isenabled(), "it is the same recovery"
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(go())
