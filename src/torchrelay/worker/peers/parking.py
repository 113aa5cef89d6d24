"""Parking: this rank is written down, as a snapshot on a disk, and whoever goes on from there finds it again.

found          at the start of a worker: which ranks' files of the parking lie here
WrittenDown    at the safepoint after the boundary: one file, whole and on the disk before that is said
Forecast       after the first update: how long that will take, by a file that is written for a try
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash

from torchrelay.protocol.messages.events import Answer, ParkFailed, Snapshot, WorkerJoined, WorkerParked
from torchrelay.protocol.messages.ids import JobId, Rank, WorkerId
from torchrelay.protocol.messages.orders import Park
from torchrelay.wire.files.snapshot_store import Sizes, SnapshotStore, name_of
from torchrelay.wire.messages.worker_frames import Welcome
from torchrelay.wire.parked.folder import bytes_per_s, clear_older, make_folder, sync_folder
from torchrelay.worker.control.agent_connection import AgentConnection
from torchrelay.worker.control.identity import Identity
from torchrelay.worker.control.position import Position
from torchrelay.worker.source.program import Program
from torchrelay.worker.state.state import State
from torchrelay.worker.tensors import memory

SLOW = (
    "torchrelay: this job could not be parked in time: {} bytes of this node's ranks take {:.0f} s to {} at {} a "
    "second, and there are {:g} s (--grace). Give a longer --grace, or a faster --park-dir"
)


class Host(Protocol):
    """What parking needs of this worker; a `Session` is one."""

    worker: WorkerId
    job: JobId
    position: Position
    identity: Identity
    agent: AgentConnection
    welcome: Welcome

    @property
    def rank(self) -> Rank: ...


def found(welcome: Welcome) -> dict[str, Any]:
    """What a worker says of the parking that the job goes on from: the fields of `WorkerStarted`."""
    resumes = welcome.resumes
    if resumes is None:
        return {}
    kept = SnapshotStore(Path(resumes.folder)).kept() or ()
    ranks = tuple(one.rank for one in kept if (one.point, one.restarts) == (resumes.point, resumes.restarts))
    return {"all_parked": True} if len(ranks) == welcome.world_size else {"parked": ranks}


class Writer(Host, Protocol):
    """And what it needs to write the rank down."""

    program: Program


class WrittenDown:
    """What was written at the safepoint where this worker stands."""

    def __init__(self) -> None:
        self._file: Path | None = None
        self._answered: Park | None = None

    def answered(self, order: Park) -> bool:
        """Whether this order was obeyed, or could not be."""
        return self._answered == order

    def write(self, session: Writer, state: State, order: Park, private: bytes, why_not: str) -> Answer | None:
        """Write the file. Returns what is to be said, or None if a newer generation has come in between."""
        self.drop()
        begun = time.monotonic()
        try:
            size, digest = (0, "") if why_not else self._write(session, state, order, private)
        except _Cut:
            return None
        except OSError as error:
            why_not = error.strerror or str(error)
        self._answered = order
        if why_not:
            return ParkFailed(
                job=session.job,
                generation=order.generation,
                worker=session.worker,
                rank=order.rank,
                reason=why_not,
            )
        return WorkerParked(
            job=session.job,
            generation=order.generation,
            worker=session.worker,
            rank=order.rank,
            node=session.welcome.node,
            point=order.point,
            size=size,
            private=xxhash.xxh3_128_hexdigest(private),
            digest=digest,
            torch=str(torch.__version__),
            code=session.program.script,
            took_ms=1000 * (time.monotonic() - begun),
        )

    def _write(self, session: Writer, state: State, order: Park, private: bytes) -> tuple[int, str]:
        """Raises OSError, and `_Cut`."""
        folder = Path(order.folder)
        make_folder(folder.parent)
        clear_older(folder.parent, folder.name, order.keep)
        make_folder(folder)
        what = Snapshot(order.rank, order.point, session.identity.wait().restarts)
        head, tensors = state.manifest()
        sizes = Sizes(len(private), len(head), sum(map(memory.size, tensors)))
        self._file = folder / name_of(what)
        with SnapshotStore(folder, durable=True).begin(what, sizes, None) as draft:
            draft.write(private)
            draft.write(head)
            for tensor in tensors:
                for view in memory.outgoing(tensor):
                    if session.position.heard != order.generation:
                        raise _Cut
                    draft.write(view)
            draft.finish()
            digest = draft.digest().hex()
        sync_folder(folder)
        sync_folder(folder.parent)
        return sizes.whole, digest

    def drop(self) -> None:
        """This worker goes on: nobody can go on from there any more."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.unlink(missing_ok=True)


class _Cut(Exception):
    """A fault has come: the file is of no use."""


class Forecast:
    """Of one worker; the one with the lowest rank of a node looks for all."""

    def __init__(self, session: Host, state: State, shard: str) -> None:
        self._session = session
        self._state = state
        self._shard = shard

    @property
    def wanted(self) -> bool:
        """Whether this worker is to look."""
        welcome = self._session.welcome
        return bool(welcome.park_dir) and self._session.rank % max(1, welcome.nproc_per_node) == 0

    def __call__(self) -> None:
        """At the entry of a call: sizes now, and the rest beside the training."""
        _, tensors = self._state.manifest()
        size = sum(map(memory.size, tensors)) * max(1, self._session.welcome.nproc_per_node)
        threading.Thread(target=self._look, args=(size,), name="torchrelay forecast", daemon=True).start()

    def _look(self, size: int) -> None:
        session, folder = self._session, Path(self._session.welcome.park_dir)
        try:
            make_folder(folder)
            rate = bytes_per_s(folder, size)
        except OSError as error:
            why = error.strerror or error
            print(f"torchrelay: this job cannot be parked in {folder}: {why}", file=sys.stderr, flush=True)
            return
        takes_s, there_s = size / rate, session.welcome.grace_ms / 1000
        if takes_s > there_s:
            told = SLOW.format(f"{size:,}", takes_s, folder, f"{rate / 1e6:,.0f} MB", there_s)
            print(told, file=sys.stderr, flush=True)
        joined = WorkerJoined(
            worker=session.worker,
            job=session.job,
            rank=session.rank,
            shard=self._shard,
            park_ms=max(1, round(1000 * takes_s)),
        )
        session.agent.say(joined)
