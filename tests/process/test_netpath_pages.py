"""The page of figures that the network core keeps: what it says of a link when comms come and go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchrelay.netpath.native.library import NotBuilt, find

# One process is both ends; it prints what its page says of the second path, at each point of the story.
STORY = """
import ctypes, json, os, time
from pathlib import Path
from torchrelay.netpath.native.binding import Connecting, Listener, inject
from torchrelay.wire.messages.netreport import read_page

FOLDER = Path(os.environ["TORCHRELAY_NET_STATS"])

def until(what, fact):
    deadline = time.monotonic() + 20
    while not (found := fact()):
        assert time.monotonic() < deadline, what
        time.sleep(0.005)
    return found

def comms():
    listener = Listener()
    connecting = Connecting(listener.handle, 0)
    out = until("connected", connecting.poll)
    into = until("accepted", lambda: listener.accept(0))
    listener.close()
    return out, into

def second():
    page = read_page(FOLDER / f"net-{os.getpid()}")
    rows = [row for row in page.rows if row.local == "127.0.98.2"] if page is not None else []
    return [(row.state.name, row.live > 0, row.down_since_us > 0) for row in rows]

def says(*wanted):
    until(f"{wanted} in place of {second()}", lambda: second() and set(second()) == {wanted})
    print(json.dumps(wanted), flush=True)

pair = comms()
says("UP", True, False)
inject("path1:down@0s+600s")
says("DOWN", False, True)
for comm in pair:
    comm.close()
says("UP", False, False)  # not in use
lost_us = time.time_ns() // 1000
pair = comms()
says("DOWN", False, True)
assert min(row.down_since_us for row in read_page(FOLDER / f"net-{os.getpid()}").rows if row.path == 1) >= lost_us
inject("")
says("UP", True, False)
"""


def test_a_lost_link_that_nobody_uses_any_more_is_not_said_to_be_lost(tmp_path: Path) -> None:
    try:
        find()
    except NotBuilt as error:
        pytest.skip(str(error))
    env = {"TORCHRELAY_NET_PATHS": "127.0.98.1,127.0.98.2", "TORCHRELAY_NET_STATS": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", STORY], env={**os.environ, **env}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [json.loads(line)[0] for line in done.stdout.splitlines()] == ["UP", "DOWN", "UP", "DOWN", "UP"]
