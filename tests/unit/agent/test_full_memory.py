"""/dev/shm is full: no agent dies of it, whoever can train trains on, and who cannot start is told why."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import pytest

from torchrelay.agent.workers.samples import Sampler
from torchrelay.protocol.messages.ids import Point, WorkerId, WorkerPhase
from torchrelay.wire.files.page import SIZE, Page, no_room, reserve

W = WorkerId("w1")


class TestPages:
    def test_all_memory_of_a_page_is_taken_when_it_is_made(self, tmp_path: Path) -> None:
        page = Page(tmp_path / "page", create=True)
        assert (tmp_path / "page").stat().st_blocks * 512 >= SIZE
        page.close()

    def test_a_page_that_does_not_fit_is_refused_with_the_reason(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("os.posix_fallocate", full)
        with pytest.raises(OSError, match="no room") as refusal:
            reserve(tmp_path / "page")
        assert refusal.value.errno == errno.ENOSPC
        assert (tmp_path / "page").stat().st_size == 0

    def test_room_for_many_is_told_beforehand(self, tmp_path: Path) -> None:
        assert no_room(tmp_path, 1) == ""
        assert "1000000000 workers need" in no_room(tmp_path, 1_000_000_000)

    @pytest.mark.parametrize("wrong", ["cut", "garbage", "phase"])
    def test_a_bad_page_is_complained_of_once_and_ends_nobody(
        self, tmp_path: Path, wrong: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        sampler = Sampler(tmp_path)
        page = Page(sampler.path(W), create=True)
        page.keep(Point(1), b"one")
        page.beat(1, 7, 1)
        first = sampler.sample(W, os.getpid(), None)
        assert first is not None
        assert first.collectives == 7
        match wrong:
            case "cut":
                os.truncate(page.path, 100)
            case "garbage":
                page.path.write_bytes(bytes(range(256)) * 20)
            case "phase":
                with page.path.open("r+b") as file:
                    file.seek(24)
                    file.write(struct.pack("<q", -5))
        for _ in range(2):
            seen = sampler.sample(W, os.getpid(), None)
            assert seen is not None
            assert seen.phase is WorkerPhase.BOOTING
        assert len(caplog.records) == 1
        assert len(sampler.records(W)) == (1 if wrong == "phase" else 0)
        sampler.remove(W)
