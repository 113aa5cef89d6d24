"""The file FREEZE in folders where others may write: what is not a plain file of ours is not heeded, nor opened."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from argparse import Namespace
from pathlib import Path

import pytest

from tests.support.brain import serving
from torchrelay.api.endpoint import FREEZE, JOURNAL, LIFTED, TOKEN
from torchrelay.cli.operate import freeze as verb
from torchrelay.client.runs import NotPossible
from torchrelay.orchestrator.http.changes import DROPPED, lifted_by, look_for_freezes, read_freezes
from torchrelay.terminal.show import Output
from torchrelay.wire.files import owned
from torchrelay.wire.trust.trust import new_token, write_token

STRANGER = 65_534


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / JOURNAL).touch()
    return folder


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a file be a stranger's: only root may give files away; else we become somebody else."""
    if os.getuid() == 0:
        os.lchown(path, STRANGER, STRANGER)
    else:
        monkeypatch.setattr(os, "getuid", lambda: STRANGER)


def within_5_s(run_dir: Path) -> dict[str, tuple[str, str]]:
    found: list[dict[str, tuple[str, str]]] = []
    thread = threading.Thread(target=lambda: found.append(read_freezes(run_dir)), daemon=True)
    thread.start()
    thread.join(5)
    assert found, "looking must not wait for anybody"
    return found[0]


class TestReading:
    def test_a_file_of_ours_is_heeded(self, run_dir: Path) -> None:
        path = run_dir / FREEZE
        path.write_text("the \x1b[31mswitch\nann@desk\nmore\n")
        assert read_freezes(run_dir) == {f"file {path}": ("the [31mswitch", "ann@desk")}
        path.write_text("")
        assert read_freezes(run_dir) == {f"file {path}": ("", f"uid {os.getuid()}")}

    def test_only_its_beginning_is_read(self, run_dir: Path) -> None:
        (run_dir / FREEZE).write_text("x" * 5_000)
        ((reason, _),) = read_freezes(run_dir).values()
        assert len(reason) == owned.MAX_TEXT

    @pytest.mark.parametrize("kind", ["pipe", "folder", "socket"])
    def test_what_is_no_ordinary_file_is_not_heeded_and_nobody_waits_for_it(self, run_dir: Path, kind: str) -> None:
        path = run_dir / FREEZE
        with socket.socket(socket.AF_UNIX) as sock:
            if kind == "socket":
                sock.bind(str(path))
            else:
                {"pipe": os.mkfifo, "folder": os.mkdir}[kind](path)
            assert within_5_s(run_dir) == {}

    @pytest.mark.parametrize("to", ["token", "nothing", "itself"])
    def test_a_link_is_not_followed(self, run_dir: Path, to: str) -> None:
        write_token(run_dir / TOKEN, new_token())
        path = run_dir.parent / FREEZE
        path.symlink_to({"token": run_dir / TOKEN, "nothing": run_dir / "absent", "itself": path}[to])
        assert read_freezes(run_dir) == {}

    def test_a_second_name_of_a_file_of_ours_is_not_heeded(self, run_dir: Path) -> None:
        (run_dir / "diary").write_text("dear diary\n")
        (run_dir.parent / FREEZE).hardlink_to(run_dir / "diary")
        assert read_freezes(run_dir) == {}

    def test_a_strangers_file_is_not_heeded(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = run_dir.parent / FREEZE
        path.write_text("ha\n")
        if os.getuid() != 0:
            path.chmod(0o644)
        give_away(path, monkeypatch)
        assert read_freezes(run_dir) == {}

    def test_one_of_ours_that_cannot_be_read_is_heeded(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = run_dir / FREEZE
        path.touch()

        def denied(*_: object) -> int:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(os, "open", denied)
        assert read_freezes(run_dir)[f"file {path}"][0] == "(FREEZE cannot be read: Permission denied)"

    def test_what_is_not_heeded_is_told_once(self, run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
        path = run_dir / FREEZE
        os.mkfifo(path)
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                read_freezes(run_dir)
            assert [r.getMessage() for r in caplog.records] == [f"{path} is not heeded: it is no ordinary file"]
            path.unlink()
            read_freezes(run_dir)
            path.symlink_to(run_dir)
            read_freezes(run_dir)
        assert len(caplog.records) == 2

    def test_secrets_are_dropped(self, run_dir: Path) -> None:
        token = write_token(run_dir / TOKEN, "not-one-of-ours-0123456789").read_text().strip()
        for secret in (token, new_token()):
            (run_dir / FREEZE).write_text(f"why\nann {secret}\n")
            assert list(read_freezes(run_dir).values()) == [(DROPPED, f"uid {os.getuid()}")]


class TestWhoLifted:
    def test_the_note_names_who(self, run_dir: Path) -> None:
        (run_dir / LIFTED).write_text("ann@desk\n")
        assert lifted_by(run_dir / FREEZE) == "ann@desk"

    def test_no_note_an_empty_one_an_old_one_or_a_link_name_nobody(self, run_dir: Path) -> None:
        note = run_dir / LIFTED
        nobody = "whoever removed the file"
        assert lifted_by(run_dir / FREEZE) == nobody
        note.touch()
        assert lifted_by(run_dir / FREEZE) == nobody
        note.write_text("ann@desk\n")
        os.utime(note, (1, 1))
        assert lifted_by(run_dir / FREEZE) == nobody
        note.unlink()
        (run_dir / "diary").write_text("dear diary\n")
        note.symlink_to(run_dir / "diary")
        assert lifted_by(run_dir / FREEZE) == nobody

    def test_a_strangers_note_is_not_read(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (run_dir / LIFTED).write_text("root@heaven\n")
        give_away(run_dir / LIFTED, monkeypatch)
        assert lifted_by(run_dir / FREEZE) == "whoever removed the file"


def words(run_dir: Path, **changes: object) -> Namespace:
    given = {"run_dir": run_dir, "all": True, "reason": "why", "yes": True, "dry_run": False, "output": Output.TABLE}
    return Namespace(**given | changes)


class TestWriting:
    @pytest.fixture(autouse=True)
    def _nobody_serves(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(verb, "seen", lambda *_, **__: "")

    def test_nothing_is_written_through_links_that_lie_there(self, run_dir: Path) -> None:
        folder, diary = run_dir.parent, run_dir / "diary"
        diary.write_text("dear diary\n")
        for name in (FREEZE, f".{FREEZE}.draft", LIFTED):
            (folder / name).symlink_to(diary)
        verb.freeze(words(run_dir))
        assert (folder / FREEZE).read_text().startswith("why\n")
        assert not (folder / FREEZE).is_symlink()
        verb.unfreeze(words(run_dir))
        assert not (folder / FREEZE).exists()
        assert diary.read_text() == "dear diary\n"
        left = {path.name for path in folder.iterdir()}
        assert left == {"run", f".{FREEZE}.draft", LIFTED}

    def test_a_note_that_cannot_be_left_does_not_keep_the_freeze(self, run_dir: Path) -> None:
        verb.freeze(words(run_dir))
        (run_dir.parent / LIFTED).mkdir()
        verb.unfreeze(words(run_dir))
        assert not (run_dir.parent / FREEZE).exists()

    def test_no_draft_is_left_when_it_cannot_be_put_in_place(self, run_dir: Path) -> None:
        (run_dir.parent / FREEZE).mkdir()
        with pytest.raises(NotPossible, match="nothing was changed"):
            verb.freeze(words(run_dir))
        assert {path.name for path in run_dir.parent.iterdir()} == {"run", FREEZE}

    def test_frozen_already_is_said_of_an_ordinary_file_only(
        self, run_dir: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        verb.freeze(words(run_dir))
        capsys.readouterr()
        verb.freeze(words(run_dir))
        assert "frozen already" in capsys.readouterr().out


def test_a_start_is_not_held_up_by_a_pipe(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as service:
            os.mkfifo(tmp_path / FREEZE)
            look_for_freezes(service, tmp_path)
            assert not service.cluster.freezes

    asyncio.run(asyncio.wait_for(story(), 10))
