"""What tests of the Slurm plugin on a fake of Slurm share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from tests.support.fake_slurm import FakeSlurm
from torchrelay.schedulers.slurm.asking import Wishes
from torchrelay.schedulers.slurm.commands import Commands
from torchrelay.schedulers.slurm.plugin import SlurmScheduler, StartAgent, open_slurm

DEADLINE_S = 60.0
RISKY = Wishes(poll_s=0.02, rest=0.0, shrink_risk=True, yields="low")


@asynccontextmanager
async def plugin(
    fake: FakeSlurm, wishes: Wishes = RISKY, start_agent: StartAgent | None = None, deadline_s: float = 20.0
) -> AsyncIterator[SlurmScheduler]:
    commands = Commands(fake.environ, deadline_s=deadline_s, most_bytes=1 << 20)
    async with open_slurm(1, fake.folder, wishes, start_agent, commands) as scheduler:
        yield scheduler


def play(fake: FakeSlurm, story: Callable[[SlurmScheduler], Awaitable[None]], wishes: Wishes = RISKY) -> None:
    async def all_of_it() -> None:
        async with asyncio.timeout(DEADLINE_S), plugin(fake, wishes) as scheduler:
            await story(scheduler)

    asyncio.run(all_of_it())
