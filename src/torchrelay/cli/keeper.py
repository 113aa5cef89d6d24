"""Keeper: keeps a run's orchestrator alive. Its death does not touch training; it goes on from its journal."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from torchrelay.cli.runs import NotPossible
from torchrelay.orchestrator.endpoint import Endpoint, read_endpoint
from torchrelay.schedulers.tether import tethered

START_S = 30.0
AGAIN_S = 0.2
# Ends in a row within this time after a start, before it is given up.
QUICK_S = 20.0
TRIES = 5
STAYED_AWAY = 92
CANNOT_START = 94
DEFECT = 95


class Keeper:
    """Starts an orchestrator, and starts it again on the same port and journal whenever it ends unasked."""

    def __init__(self, run_dir: Path, port: int, host: str = "127.0.0.1") -> None:
        self._run_dir = run_dir
        self._port = port
        self._host = host
        self._process: asyncio.subprocess.Process | None = None
        self._wanted = True
        self.endpoint: Endpoint | None = None

    async def start(self) -> Endpoint:
        """Start it and wait until it listens. Raises `NotPossible` with what it said if it does not."""
        self._process = await self._launch()
        ended = asyncio.create_task(self._process.wait())
        try:
            async with asyncio.timeout(START_S):
                while not ended.done():
                    endpoint = read_endpoint(self._run_dir)
                    if endpoint is not None and endpoint.pid == self._process.pid:
                        self.endpoint = endpoint
                        return endpoint
                    await asyncio.wait((ended,), timeout=0.01)
        except TimeoutError:
            raise NotPossible(f"the orchestrator did not listen within {START_S:g} s", CANNOT_START) from None
        finally:
            ended.cancel()
        code = self._process.returncode
        raise NotPossible(self._last_words(), code if code in (CANNOT_START, DEFECT) else CANNOT_START)

    async def keep(self) -> NotPossible:
        """Start it again as often as needed. Returns when there is no use in it, with the reason."""
        loop, quick = asyncio.get_running_loop(), 0
        while True:
            since = loop.time()
            assert self._process is not None, "it has been started"
            code = await self._process.wait()
            if not self._wanted:
                return NotPossible("it was told to end", 0)
            if code == DEFECT:
                return NotPossible(self._last_words(), DEFECT)
            quick = quick + 1 if loop.time() - since < QUICK_S else 1
            if quick >= TRIES:
                reason = f"the orchestrator ended {quick} times in a row, last with {code}: {self._last_words()}"
                return NotPossible(reason, STAYED_AWAY)
            await asyncio.sleep(AGAIN_S)
            self._process = await self._launch()

    async def stop(self, grace_s: float) -> None:
        """Wait for its end, which somebody has asked it for; after `grace_s` kill it."""
        self._wanted = False
        if self._process is None or self._process.returncode is not None:
            return
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    def expect_end(self) -> None:
        """Its next end is wanted."""
        self._wanted = False

    async def _launch(self) -> asyncio.subprocess.Process:
        port = self._port if self.endpoint is None else int(self.endpoint.url.rpartition(":")[2])
        command = [sys.executable, "-m", "torchrelay.orchestrator", "--run-dir", str(self._run_dir)]
        command += ["--host", self._host, "--port", str(port)]
        with self._words_file().open("wb") as words:
            return await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=words, stderr=words,
                start_new_session=True, preexec_fn=tethered(),
            )  # fmt: skip

    def _words_file(self) -> Path:
        return self._run_dir / "logs" / "orchestrator.err"

    def _last_words(self) -> str:
        """What it said last."""
        lines = self._words_file().read_text(errors="replace").strip().splitlines()
        said = lines[-1].removeprefix("torchrelay: ") if lines else "it said nothing"
        return said if lines else f"the orchestrator ended; {said}"
