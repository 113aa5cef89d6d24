"""The orchestrator as a process: killed and started again, and refused a start in words."""

from __future__ import annotations

import json
import resource
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from tests.support.brain import listening, spec, start_process, wait_for
from torchrelay.api.endpoint import read_endpoint
from torchrelay.client.client import Away, Client, Denied
from torchrelay.launcher.keeper import answers


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


class Brains:
    """Orchestrator processes; all are ended at the end of the test."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *words: str) -> subprocess.Popen[str]:
        self.started.append(start_process(self.run_dir, *words))
        return self.started[-1]

    def client(self, *words: str) -> tuple[subprocess.Popen[str], Client]:
        """A process that listens, and its client."""
        process = self.start(*words)
        listening(process, self.run_dir)
        return process, Client.of(self.run_dir)


@pytest.fixture
def brains(run_dir: Path) -> Iterator[Brains]:
    brains = Brains(run_dir)
    yield brains
    for process in brains.started:
        process.kill()
        process.communicate()


class TestProcess:
    def test_killed_at_any_moment_it_comes_back_as_it_was(self, brains: Brains) -> None:
        process, client = brains.client()
        client.submit(spec())
        before = client.status()
        process.kill()
        process.wait()
        with pytest.raises(Away):
            client.status()
        _, client = brains.client()
        assert client.status() == before | {"lease": before["lease"] + 1}

    def test_a_second_one_on_the_same_journal_ends_with_94_and_the_first_goes_on(self, brains: Brains) -> None:
        first, client = brains.client()
        second = brains.start()
        told = second.communicate(timeout=30)[1]
        assert second.returncode == 94
        assert f"in use by another orchestrator (pid {first.pid})" in told
        assert len(told.splitlines()) == 1
        client.submit(spec())

    def test_a_port_in_use_ends_with_94(self, brains: Brains) -> None:
        with closing(socket.create_server(("127.0.0.1", 0))) as taken:
            process = brains.start("--port", str(taken.getsockname()[1]))
            told = process.communicate(timeout=30)[1]
        assert process.returncode == 94
        assert "choose another --port" in told

    def test_a_folder_that_cannot_be_written_ends_with_94(self, brains: Brains) -> None:
        brains.run_dir.write_text("a file where the folder should be")
        process = brains.start()
        told = process.communicate(timeout=30)[1]
        assert process.returncode == 94
        assert "choose a folder" in told

    def test_a_file_that_is_no_journal_ends_with_94(self, brains: Brains) -> None:
        brains.run_dir.mkdir()
        (brains.run_dir / "journal.db").write_text("Dear diary" * 1000)
        process = brains.start()
        told = process.communicate(timeout=30)[1]
        assert process.returncode == 94
        assert "not a journal" in told

    def test_a_token_that_others_can_read_ends_with_94(self, brains: Brains) -> None:
        brains.run_dir.mkdir()
        (brains.run_dir / "token").write_text("trt_known-to-everybody\n")
        (brains.run_dir / "token").chmod(0o644)
        process = brains.start()
        assert "chmod 600" in process.communicate(timeout=30)[1]
        assert process.returncode == 94

    def test_a_wrong_token_is_denied(self, brains: Brains) -> None:
        _, client = brains.client()
        with pytest.raises(Denied, match="wrong or missing token"):
            Client(client.url, "trt_wrong").status()

    def test_told_to_end_it_ends_with_0(self, brains: Brains) -> None:
        process, client = brains.client()
        client.shutdown("the test is over")
        assert process.wait(30) == 0
        process, _ = brains.client()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0

    def test_it_listens_on_loopback_only_and_says_no_secret(self, brains: Brains) -> None:
        _, client = brains.client()
        assert client.url.startswith("http://127.0.0.1:")
        token = (brains.run_dir / "token").read_text().strip()
        log = wait_for("a log", lambda: (brains.run_dir / "logs" / "orchestrator.log").read_text())
        assert token not in log
        assert (brains.run_dir / "token").stat().st_mode & 0o077 == 0
        assert json.loads((brains.run_dir / "endpoint.json").read_text())["url"] == client.url


class TestStrangers:
    """Somebody without the token, as a user of the same machine could be: thousands of connections, and garbage."""

    LIMIT = 160  # descriptors of the orchestrator: far fewer than there are connections

    @pytest.fixture
    def inside(self, tmp_path: Path) -> Path:
        folder = tmp_path / "inside"
        folder.mkdir(mode=0o700)
        return folder / "orchestrator"

    def test_a_crowd_at_the_port_keeps_nobody_out_and_ends_nothing(self, brains: Brains, inside: Path) -> None:
        process, client = brains.client("--socket", str(inside))
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (self.LIMIT, self.LIMIT))
        client.submit(spec())
        port = int(client.url.rpartition(":")[2])
        crowd = []
        try:
            for _ in range(4):
                for _ in range(150):
                    stranger = socket.socket()
                    stranger.setblocking(False)
                    stranger.connect_ex(("127.0.0.1", port))
                    crowd.append(stranger)
                assert Client.of(brains.run_dir).status()["job"] == "job"
                assert answers(read_endpoint(brains.run_dir)), "the keeper must not take it for stuck"
            # Without the socket, too: the oldest strangers make room.
            token = (brains.run_dir / "token").read_text().strip()
            wait_for("an answer at the port", lambda: at_port(client.url, token))
        finally:
            for stranger in crowd:
                stranger.close()
        assert process.poll() is None
        assert len((brains.run_dir / "logs" / "orchestrator.log").read_bytes()) < 20_000

    def test_bad_requests_cost_a_line_each_and_few_lines(self, brains: Brains) -> None:
        process, client = brains.client()
        port = int(client.url.rpartition(":")[2])
        for _ in range(60):
            with closing(socket.create_connection(("127.0.0.1", port))) as stranger, suppress(OSError):
                stranger.sendall(b"GET /" + bytes(range(1, 256)) * 500 + b" HTTP/1.1\r\n\r\n")
                stranger.settimeout(5)
                stranger.recv(100)
        assert process.poll() is None
        client.view_status()
        log = (brains.run_dir / "logs" / "orchestrator.log").read_text()
        assert len(log) < 20_000
        assert max(map(len, log.splitlines())) < 400


def at_port(url: str, token: str) -> str:
    try:
        return str(Client(url, token).status()["job"])
    except (Away, Denied):
        return ""
