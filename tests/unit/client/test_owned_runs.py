"""What lies in a run's folder is ours, or is not heeded: strangers get neither the token nor a say in what is run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from torchrelay.agent.__main__ import trusted
from torchrelay.api.endpoint import Endpoint, write_endpoint
from torchrelay.cli.launch.run import take_folder
from torchrelay.client.client import Client
from torchrelay.client.runs import NotPossible, begun
from torchrelay.wire.files.launch import Launch, forget_environment, read_launch, write_launch
from torchrelay.wire.trust.trust import TrustError, write_token

STRANGER = 65534  # nobody
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The folder of a run of ours."""
    folder = tmp_path / "run"
    take_folder(folder, None)
    write_token(folder / "token", "trt_secret")
    write_endpoint(folder, Endpoint(url="http://127.0.0.1:1", pid=1))
    write_launch(folder, Launch(script="train.py", args=("--lr", "1"), cwd="/", env={"API_KEY": "secret"}))
    return folder


class TestFolders:
    @pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777, 0o702])
    def test_one_in_which_others_may_write_is_refused(self, tmp_path: Path, mode: int) -> None:
        folder = tmp_path / "shared"
        folder.mkdir()
        folder.chmod(mode)
        with pytest.raises(NotPossible, match=r"is open to others .*: use a new folder") as refusal:
            take_folder(folder, None)
        assert refusal.value.code == 94
        assert list(folder.iterdir()) == []

    @as_root
    def test_another_users_is_refused(self, tmp_path: Path) -> None:
        folder = tmp_path / "theirs"
        folder.mkdir(mode=0o700)
        os.chown(folder, STRANGER, STRANGER)
        with pytest.raises(NotPossible, match=r"belongs to another user \(uid 65534\)"):
            take_folder(folder, None)

    def test_an_empty_one_of_ours_is_closed(self, tmp_path: Path) -> None:
        folder = tmp_path / "new"
        folder.mkdir(mode=0o755)
        take_folder(folder, None)
        assert folder.stat().st_mode & 0o777 == 0o700

    def test_one_that_others_may_read_is_refused_if_there_is_something_in_it(self, tmp_path: Path) -> None:
        folder = tmp_path / "used"
        folder.mkdir(mode=0o755)
        (folder / "data").touch()
        with pytest.raises(NotPossible, match="chmod 700"):
            take_folder(folder, None)

    def test_folders_that_are_made_on_the_way_are_nobody_elses_whatever_the_umask(self, tmp_path: Path) -> None:
        before = os.umask(0)
        try:
            take_folder(tmp_path / "runs" / "job", None)
        finally:
            os.umask(before)
        assert (tmp_path / "runs").stat().st_mode & 0o022 == 0


@as_root
class TestFiles:
    def test_the_token_is_not_shown_where_a_stranger_says(self, run_dir: Path) -> None:
        os.chown(run_dir / "endpoint.json", STRANGER, STRANGER)
        with pytest.raises(ValueError, match=r"endpoint.json is not trusted: it belongs to another user \(uid 65534\)"):
            Client.of(run_dir)
        with pytest.raises(ValueError, match="is not trusted"):
            trusted(run_dir / "endpoint.json")

    def test_what_a_stranger_wants_to_run_is_not_run(self, run_dir: Path) -> None:
        os.chown(run_dir / "job.json", STRANGER, STRANGER)
        with pytest.raises(ValueError, match=r"job.json is not trusted: it belongs to another user \(uid 65534\)"):
            read_launch(run_dir)

    def test_a_strangers_token_is_not_taken(self, run_dir: Path) -> None:
        os.chown(run_dir / "token", STRANGER, STRANGER)
        with pytest.raises(TrustError, match="belongs to another user"):
            Client.of(run_dir)


class TestAfterwards:
    def test_the_operators_environment_is_not_kept(self, run_dir: Path) -> None:
        os.utime(run_dir / "job.json", (1000, 1000))
        forget_environment(run_dir)
        assert "secret" not in (run_dir / "job.json").read_text()
        launch = read_launch(run_dir)
        assert (launch.script, launch.args, launch.env) == ("train.py", ("--lr", "1"), {})
        assert begun(run_dir) == 1000

    def test_nor_on_a_full_disk(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "write_bytes", full)
        forget_environment(run_dir)
        assert (run_dir / "job.json").read_bytes() == b""

    def test_links_are_not_followed(self, run_dir: Path, tmp_path: Path) -> None:
        (tmp_path / "elsewhere").write_text(json.dumps({"url": "http://evil", "pid": 1}))
        (run_dir / "endpoint.json").unlink()
        (run_dir / "endpoint.json").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ValueError, match="it is a link"):
            Client.of(run_dir)
