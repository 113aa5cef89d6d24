"""Other users of the machine, who reach the ports of ranks and know no secret."""

from __future__ import annotations

import os
import re
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.brain import wait_for
from tests.support.jobs import SCRIPTS, end_job, start_job
from tests.support.strangers import USUAL
from torchrelay.client.client import Client

IDLE = 1200
PORTS = 8  # at most, of the ranks of this job


@contextmanager
def soft_limit(wanted: int) -> Iterator[int]:
    """This process and what it starts; yields the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    try:
        yield hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def ports_of(pid: int) -> list[int]:
    """The TCP ports on which a process listens: proc(5), net/tcp, of its sockets by their inodes."""
    descriptors = Path(f"/proc/{pid}/fd")
    held = {os.readlink(each) for each in descriptors.iterdir()}
    rows = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()
    ]
    listening = [row for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in held]
    return [int(row[1].rpartition(":")[2], 16) for row in listening]


def connect(port: int) -> socket.socket:
    """A connection that says nothing, whether it is accepted or waits to be."""
    idle = socket.socket()
    idle.setblocking(False)
    idle.connect_ex(("127.0.0.1", port))
    return idle


@pytest.mark.timeout(180)
def test_idle_connections_to_all_ports_of_ranks_end_nobody(tmp_path: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < (PORTS + 1) * IDLE:
        pytest.skip(f"the hard limit of {hard} open files is too low for so many connections")
    run_dir = tmp_path / "run"
    with soft_limit(USUAL):
        process = start_job(
            run_dir, [str(SCRIPTS / "besieged.py"), str(tmp_path)], ["--nproc-per-node", "2", "--spares", "1"]
        )
    wait_for("both ranks wait", lambda: all((tmp_path / f"at-{rank}").exists() for rank in range(2)), 90)
    rows = Client.of(run_dir).ranks()["ranks"]
    pids = [row["pid"] for row in rows if row["rank"] is not None]
    ports = [port for pid in pids for port in ports_of(pid)]
    assert 2 <= len(ports) <= PORTS
    with ExitStack() as held, soft_limit(hard):
        for port in ports:
            for _ in range(IDLE):
                held.enter_context(connect(port))
        wait_for("they are accepted", lambda: all(len(os.listdir(f"/proc/{pid}/fd")) > USUAL for pid in pids), 60)
        (tmp_path / "go").touch()
        done = end_job(process, run_dir, timeout_s=90)
    assert done.code == 0, done.output
    assert "1 incident, resolved clean" in done.output
    for rank in range(2):
        keys = (tmp_path / f"keys-{rank}").read_text().splitlines()
        meeting = {key.split("/")[1] for key in keys if key.startswith("torchrelay/")}
        assert meeting, keys
        assert all(re.fullmatch("[0-9a-f]{64}", name) for name in meeting), "nobody can write there beforehand"
        assert [key for key in keys if re.search(r"(lanes|devices|roll)/\d", key) and key[:11] != "torchrelay/"] == []
