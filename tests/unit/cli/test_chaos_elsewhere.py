"""Faults are made on this machine: a process of another one has a number that here is somebody else's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from torchrelay.api.shown import RankStatus
from torchrelay.chaos.deeds import plan_deed
from torchrelay.chaos.whereabouts import Refusal, Whereabouts
from torchrelay.chaos.wishes import Deed, Facts, Wish
from torchrelay.protocol.messages.ids import NodeId, Rank, WorkerId
from torchrelay.schedulers.local import NODES, write_file
from torchrelay.schedulers.machine import Machine
from torchrelay.schedulers.port import ClusterView, NodeView

ELSEWHERE = NodeId("m3")


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process of ours that has nothing to do with the run, and the number of a rank's process on another machine."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def facts(pid: int) -> Facts:
    row = SimpleNamespace(rank=Rank(1), pid=pid, worker=WorkerId("m3.0.1"), node=ELSEWHERE, state="training")
    ranks = SimpleNamespace(ranks=(cast(RankStatus, row),))
    return Facts(job=SimpleNamespace(world_size=2), ranks=ranks)  # type: ignore[arg-type]


def where(run_dir: Path, *nodes: str) -> Whereabouts:
    view = ClusterView(nodes=tuple(NodeView(node=NodeId(node), slots=1) for node in nodes), grants=())
    if nodes:
        write_file(run_dir / NODES, view)
    machine = Machine(boot="", host="m1", uid=os.getuid(), pid=os.getpid(), folder=str(run_dir))
    return Whereabouts(run_dir, machine, None)


@pytest.mark.parametrize("deed", [Deed.KILL, Deed.STOP, Deed.EXIT, Deed.OOM, Deed.SLOW])
@pytest.mark.parametrize("here", [(), ("m1",)])
def test_a_rank_on_another_machine_is_refused(
    tmp_path: Path, stranger: subprocess.Popen[bytes], deed: Deed, here: tuple[str, ...]
) -> None:
    wish = Wish(deed=deed, rank=Rank(1))
    with pytest.raises(Refusal, match="m3 is a machine of its own"):
        plan_deed(wish, facts(stranger.pid), where(tmp_path, *here)).act()
    assert stranger.poll() is None


def test_a_node_that_is_another_machine_is_refused(tmp_path: Path, stranger: subprocess.Popen[bytes]) -> None:
    with pytest.raises(Refusal, match="m3 is a machine of its own"):
        where(tmp_path, "m1").family(ELSEWHERE, [stranger.pid])
