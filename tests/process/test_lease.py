"""The lease: two orchestrators never both act, whatever the file lock says."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from tests.support.brain import listening, spec, start_process, until
from tests.support.lease import an_uplink
from torchrelay.agent.allegiance import Known
from torchrelay.client.client import Away, Client
from torchrelay.wire.trust.trust import read_token


class TestProcesses:
    @pytest.fixture
    def first(self, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
        process = start_process(tmp_path)
        try:
            listening(process, tmp_path)
            yield process
        finally:
            process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()

    def test_stopped_replaced_and_woken_it_ends_with_96(self, tmp_path: Path, first: subprocess.Popen[str]) -> None:
        old = Client.of(tmp_path)
        old.submit(spec())
        first.send_signal(signal.SIGSTOP)
        second = start_process(tmp_path, "--take-over")
        try:
            listening(second, tmp_path)
            new = Client.of(tmp_path)
            assert new.url != old.url
            assert new.status()["lease"] == 2
            first.send_signal(signal.SIGCONT)
            assert first.wait(30) == 96
            told = first.communicate()[1]
            assert "this orchestrator ends: lease 1" in told
            assert "another orchestrator holds it now (lease 2)" in told
            assert len(told.splitlines()) == 1
            new.cancel("job", "the second one still acts")
            assert new.status()["outcome"]["code"] == 130
            with pytest.raises(Away):
                old.status()
        finally:
            second.kill()
            second.communicate()

    def test_an_agent_heeds_no_orchestrator_of_a_lower_lease(
        self, tmp_path: Path, first: subprocess.Popen[str], caplog: pytest.LogCaptureFixture
    ) -> None:
        async def story() -> None:
            heard: list[object] = []
            token = partial(read_token, tmp_path / "token")
            uplink = an_uplink(lambda: Client.of(tmp_path).url, token, heard.append)
            uplink.allegiance.known = Known(lease=7)  # it was attached to a later one
            running = asyncio.create_task(uplink.run())
            await until("a refusal", lambda: "lease 1 is over" in caplog.text)
            assert heard == []
            assert not uplink.connected
            uplink.allegiance.known = Known()
            await until("an orchestrator that it takes", lambda: uplink.connected)
            assert uplink.allegiance.known.lease == 1
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

        assert first.poll() is None
        asyncio.run(asyncio.wait_for(story(), 30))
