"""Lent: what an update changes in attributes, and for which of it another rank's values may stand.

A rank that is lost between its update and the return of its step has told what attributes were at its gate. What the
step changes after that (a count, a best value, a hidden state) comes from ranks that have returned. Whether they are
alike nobody has said. So each rank keeps digests of the values at its last returns, and a replacement compares those of
its predecessor with theirs:

    unequal in one of them     each rank has its own: a replacement does not have it
    equal, and they changed    the update makes them alike: taken
    equal, and never changed   taken if it has not changed now; else nobody knows, and a replacement does not have it
    one side has none          as above

What a replacement does not have is refused when it is read: see `tensors.absent`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import pairwise

import msgspec
from msgspec import Struct

RETURNS = 8  # of which digests are kept
MOST = 64  # paths that have digests of their own; if there are more, all have one together
_SIZE = 8  # bytes of a digest
ALL = ""  # the path of all together

History = Mapping[str, bytes]  # by path, digests of the last returns, the last one at the end

_entries = msgspec.msgpack.Decoder(list[tuple[str, msgspec.Raw, bool, bool]]).decode


class Lent(Struct, array_like=True, frozen=True):
    """What a rank that has returned tells of it."""

    values: bytes = b""  # a record of `hidden_state.moving`
    history: dict[str, bytes] = {}  # with that of the return at which the values were these


class Returns:
    """The digests of one rank."""

    def __init__(self, history: History | None = None) -> None:
        self.history = dict(history or {})

    def note(self, told: Mapping[str, bytes]) -> None:
        """A call has returned. `told`: of what updates change, by path. What is not told any more is not known."""
        digests = {path: _digest([path.encode(), value]) for path, value in told.items()}
        if len(digests) > MOST:
            digests = {ALL: _digest(digests[path] for path in sorted(digests))}
        kept = (RETURNS - 1) * _SIZE
        self.history = {path: self.history.get(path, b"")[-kept:] + digest for path, digest in digests.items()}


def parted(record: bytes) -> dict[str, bytes]:
    """What is told of each path."""
    return {path: bytes(value) for path, value, *_ in _entries(record)} if record else {}


def without(record: bytes, paths: Collection[str]) -> bytes:
    """The same, and nothing of these paths."""
    kept = [entry for entry in _entries(record) if entry[0] not in paths] if record else []
    return msgspec.msgpack.encode(kept) if kept else b""


def _digest(parts: Iterable[bytes]) -> bytes:
    sums = blake2b(digest_size=_SIZE)
    for part in parts:
        sums.update(part)
    return sums.digest()


def unproved(mine: History, lenders: Sequence[Lent], paths: Iterable[str]) -> list[str]:
    """Those of these paths for which no lender's value may stand. `mine`: of returns before the lenders' last one."""
    last = [lender.history for lender in lenders]
    if ALL in mine or any(ALL in history for history in last):
        return [] if _is_alike(ALL, mine, last) else sorted(paths)
    return sorted(path for path in paths if not _is_alike(path, mine, last))


def _is_alike(path: str, mine: History, theirs: Sequence[History]) -> bool:
    own = _digests(mine.get(path, b""))
    others = [_digests(history.get(path, b"")) for history in theirs]
    if not others or not all(others) or any(other[-1] != others[0][-1] for other in others):
        return False
    return all(_has_been_alike(own, other) for other in others)


def _has_been_alike(own: list[bytes], other: list[bytes]) -> bool:
    *before, now = other
    known = min(len(own), len(before))
    if known == 0 or own[-known:] != before[-known:]:
        return False
    return now == before[-1] or any(one != next_one for one, next_one in pairwise(own[-known:]))


def _digests(joined: bytes) -> list[bytes]:
    return [joined[at : at + _SIZE] for at in range(0, len(joined), _SIZE)]
