"""Snapshot upload: a snapshot goes to another node's snapshot store, or comes back from it. Proved as transfers are.

give    by the rank that it is of, to its buddy: "shelve <rank> <restarts>", sizes and digest, then all of it
take    by the buddy's state server: checked by its digest before it counts
hand    by any worker on a node that has it, to the rank's next holder: "snapshot <rank> <restarts>"
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

from torchrelay.protocol.messages.events import Snapshot
from torchrelay.protocol.messages.ids import START, Generation, Point, Rank
from torchrelay.protocol.messages.orders import Source
from torchrelay.wire.files.snapshot_store import DIGEST, Kept, NoRoom, Sizes, SnapshotStore
from torchrelay.worker.transfer.serving import SHELVE, SNAPSHOT
from torchrelay.worker.transfer.stream import CHUNK, Ask, RefusedAnswer, Serving, Stream, StreamBroken
from torchrelay.worker.transfer.tls import Tls
from torchrelay.worker.transfer.transfer import STALL_S, Cancel, ask_for

_SENT = struct.Struct(f"<QQQqqq{DIGEST}s")  # sizes, whether one is to be kept, and which, and the digest
_ANSWER = struct.Struct("<H")
GIVE_S = 600.0
MOST = 1 << 44  # bytes that are announced at most


def upload_snapshot(
    address: str,
    secret: bytes,
    generation: Generation,
    what: Snapshot,
    kept: Kept,
    keep: Point | None,
    cancel: Cancel,
    tls: Tls | None = None,
) -> str:
    """Send a snapshot to the state server at `address`; returns why it was refused, or nothing.

    `keep`: the one of this rank that must stay there, too; None: all. Raises `StreamBroken`.
    """
    want = f"{SHELVE}{what.rank} {what.restarts}"
    deadline = time.monotonic() + GIVE_S
    source = Source(what.rank, address)
    with ask_for(source, secret, generation, what.point, want, deadline, cancel, tls) as stream:
        stream.allow(GIVE_S, deadline)  # in a gate nobody knows how long others take
        held = keep if keep is not None else START
        stream.send_bytes(
            _SENT.pack(
                kept.sizes.private,
                kept.sizes.head,
                kept.sizes.body,
                keep is not None,
                held.step,
                held.section,
                kept.digest,
            )
        )
        stream.send_file(kept.file, kept.places[0], kept.sizes.whole)
        (length,) = _ANSWER.unpack(stream.receive_bytes(_ANSWER.size))
        return bytes(stream.receive_bytes(length)).decode(errors="replace")


def take(
    stream: Stream, generation: Generation, ask: Ask, snapshot_store: SnapshotStore, current: Callable[[], Generation]
) -> None:
    """By the state server: put what a ward sends on the snapshot store. Raises `StreamBroken`.

    `current`: the newest generation that we have heard of. Who sends in an older one may have been replaced.
    """
    stream.send(Serving(generation, ask.point, 0, 0))
    stream.allow(GIVE_S, time.monotonic() + GIVE_S)
    private, head, body, keeps, step, section, digest = _SENT.unpack(stream.receive_bytes(_SENT.size))
    sizes = Sizes(private, head, body)
    what = _asked(ask, SHELVE)
    if sizes.whole > MOST or what is None:
        raise StreamBroken("what is announced is no snapshot")
    if current() > generation:
        raise StreamBroken(f"generation {generation} is over")
    left = sizes.whole
    try:
        with snapshot_store.begin(what, sizes, Point(step, section) if keeps else None) as draft:
            buffer = memoryview(bytearray(min(left, CHUNK)))
            while left:
                piece = buffer[: min(left, CHUNK)]
                stream.receive_into(piece)
                left -= len(piece)
                draft.write(piece)
            if draft.digest() != digest:
                raise StreamBroken("a snapshot came with another digest than was sent")
            if current() > generation:
                raise StreamBroken(f"generation {generation} is over")
            draft.finish()
    except NoRoom as error:
        reason = str(error.strerror).encode()[:1000]
        _skip(stream, left)
        stream.send_bytes(_ANSWER.pack(len(reason)) + reason)
        return
    stream.send_bytes(_ANSWER.pack(0))


def _skip(stream: Stream, count: int) -> None:
    while count > 0:
        count -= len(stream.receive_bytes(min(count, CHUNK)))


def hand(stream: Stream, generation: Generation, ask: Ask, snapshot_store: SnapshotStore) -> None:
    """By the state server: send a snapshot as a state is sent, with the digest that it had when it was taken."""
    what = _asked(ask, SNAPSHOT)
    kept = None if what is None else snapshot_store.open(what)
    if kept is None:
        stream.send(RefusedAnswer(f"there is no {ask.want} at {ask.point} on this node"))
        return
    try:
        stream.send(Serving(generation, ask.point, kept.sizes.head, kept.sizes.body))
        stream.allow(STALL_S, time.monotonic() + GIVE_S)
        stream.send_file(kept.file, kept.places[1], kept.sizes.head + kept.sizes.body)
        stream.send_bytes(kept.digest)
    finally:
        kept.close()


def _asked(ask: Ask, prefix: str) -> Snapshot | None:
    """Which snapshot is meant: '<prefix><rank> <restarts>'."""
    fields = ask.want.removeprefix(prefix).split(" ")
    if len(fields) != 2 or not all(field.isdecimal() for field in fields):
        return None
    return Snapshot(Rank(int(fields[0])), ask.point, int(fields[1]))
