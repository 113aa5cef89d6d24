"""Snapshot upload: a snapshot comes to another node's store whole or not at all, and comes back when asked for."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from torchrelay.protocol.messages.events import Snapshot
from torchrelay.protocol.messages.ids import Generation, Point, Rank
from torchrelay.protocol.messages.orders import Source
from torchrelay.wire.files.snapshot_store import PIECE, Kept, Sizes, SnapshotStore, snapshot_store_in
from torchrelay.wire.trust import trust
from torchrelay.worker.peers import snapshot_upload
from torchrelay.worker.transfer.serving import SHELVE, SNAPSHOT, StateServer
from torchrelay.worker.transfer.stream import Ask, Stream, StreamBroken
from torchrelay.worker.transfer.tls import Tls
from torchrelay.worker.transfer.transfer import Cancel, ask_for

SECRET = trust.new_secret()
NOW = Generation(3)
PRIVATE, HEAD, BODY = b"private", b"head of it", bytes(range(251)) * (PIECE // 100)


def snapshot(step: int) -> Snapshot:
    return Snapshot(Rank(2), Point(step), 0)


class Node:
    """A snapshot store, and the server of a worker beside it."""

    def __init__(self, folder: Path, tls: Tls | None) -> None:
        folder.mkdir()
        self.tls = tls
        self.snapshot_store: SnapshotStore = snapshot_store_in(folder)
        self.heard = NOW
        self.server = StateServer(SECRET, tls=tls)
        self.server.shelve = self._shelve
        self.files = folder / "snapshots"

    def _shelve(self, stream: Stream, generation: Generation, ask: Ask) -> None:
        if ask.want.startswith(SHELVE):
            snapshot_upload.take(stream, generation, ask, self.snapshot_store, lambda: self.heard)
        else:
            snapshot_upload.hand(stream, generation, ask, self.snapshot_store)

    def put(self, step: int) -> Kept:
        with self.snapshot_store.begin(snapshot(step), Sizes(len(PRIVATE), len(HEAD), len(BODY)), None) as draft:
            for part in (PRIVATE, HEAD, BODY):
                draft.write(part)
            draft.finish()
        kept = self.snapshot_store.open(snapshot(step))
        assert kept is not None
        return kept


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def nodes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Node, Node]]:
    with ExitStack() as stack:
        own, buddy = (Tls() if request.param else None for _ in range(2))
        found = Node(tmp_path / "own", own), Node(tmp_path / "buddy", buddy)
        for node in found:
            stack.callback(node.server.close)
        yield found


def give(kept: Kept, to: Node, step: int, keep: Point | None = None) -> str:
    return snapshot_upload.upload_snapshot(to.server.address, SECRET, NOW, snapshot(step), kept, keep, Cancel(), to.tls)


def ended(node: Node) -> tuple[Snapshot, ...] | None:
    """What is there when the server is done with whom it served."""
    until = time.monotonic() + 10
    while node.server._clients:
        assert time.monotonic() < until, "the server still serves somebody"
        time.sleep(0.01)
    return node.snapshot_store.kept()


def read(kept: Kept) -> bytes:
    return os.pread(kept.file, kept.sizes.whole, kept.places[0])


def test_it_comes_as_it_is(nodes: tuple[Node, Node]) -> None:
    own, buddy = nodes
    sent = own.put(10)
    assert give(sent, buddy, 10) == ""
    came = buddy.snapshot_store.open(snapshot(10))
    assert came is not None
    assert read(came) == PRIVATE + HEAD + BODY
    assert (came.sizes, came.digest, came.private) == (sent.sizes, sent.digest, PRIVATE)


def test_two_versions_are_kept_and_the_memory_of_the_third_is_used_again(nodes: tuple[Node, Node]) -> None:
    own, buddy = nodes
    for step, keep in ((10, None), (20, Point(10)), (30, Point(20)), (40, Point(30))):
        assert give(own.put(step), buddy, step, keep) == ""
    assert buddy.snapshot_store.kept() == (snapshot(30), snapshot(40))
    assert len(list(buddy.files.iterdir())) == 2


def test_what_changes_on_its_way_is_not_taken(nodes: tuple[Node, Node]) -> None:
    own, buddy = nodes
    kept = own.put(10)
    file = os.open(own.files / "0.2.10.0", os.O_WRONLY)
    os.pwrite(file, b"\xff", kept.places[2] + 5)
    os.close(file)
    with pytest.raises(StreamBroken):
        give(kept, buddy, 10)
    assert ended(buddy) == ()
    assert list(buddy.files.iterdir()) == []


def test_a_file_that_is_too_short_breaks_off(nodes: tuple[Node, Node]) -> None:
    own, buddy = nodes
    kept = own.put(10)
    os.truncate(own.files / "0.2.10.0", PIECE)
    with pytest.raises(StreamBroken, match="shorter than it was"):
        give(kept, buddy, 10)
    assert ended(buddy) == ()


def test_who_sends_in_a_generation_that_is_over_is_not_heard(nodes: tuple[Node, Node]) -> None:
    own, buddy = nodes
    buddy.heard = Generation(4)
    with pytest.raises(StreamBroken):
        give(own.put(10), buddy, 10)
    assert ended(buddy) == ()


@pytest.mark.parametrize("after", [0, PIECE], ids=["at-once", "in-the-middle"])
def test_a_node_without_room_says_so(nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    own, buddy = nodes
    kept = own.put(10)
    real = os.pwrite

    def full(file: int, data: memoryview, at: int) -> int:
        if at > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    assert "no room for" in give(kept, buddy, 10)
    assert ended(buddy) == ()
    assert list(buddy.files.iterdir()) == []


def test_it_is_handed_out_again(nodes: tuple[Node, Node]) -> None:
    own, buddy = nodes
    kept = own.put(10)
    give(kept, buddy, 10)
    source, until = Source(Rank(2), buddy.server.address), time.monotonic() + 20
    with ask_for(source, SECRET, NOW, Point(10), f"{SNAPSHOT}2 0", until, Cancel(), buddy.tls) as stream:
        assert bytes(stream.receive_bytes(len(HEAD + BODY))) == HEAD + BODY
        assert bytes(stream.receive_bytes(16)) == kept.digest


def test_one_that_is_not_there_is_refused(nodes: tuple[Node, Node]) -> None:
    _, buddy = nodes
    source, until = Source(Rank(2), buddy.server.address), time.monotonic() + 20
    with (
        pytest.raises(StreamBroken, match="there is no snapshot 2 0"),
        ask_for(source, SECRET, NOW, Point(11), f"{SNAPSHOT}2 0", until, Cancel(), buddy.tls),
    ):
        pass
