"""SavedCluster: the core's state at one event of the journal, so that a start need not replay all that came before.

It is made of the state itself, and is only kept if it reads back as exactly that state. It is trusted if its digest is
right, and if it was written by the same rules for the same kinds of values (`SHAPE`); else an older one is, or none.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct

from torchrelay.api.shown import Leg
from torchrelay.protocol.messages.ids import JobId
from torchrelay.protocol.model.state import Cluster
from torchrelay.protocol.model.table import Table
from torchrelay.protocol.rules.cluster import RULES_VERSION

Ways = dict[tuple[JobId, int], tuple[Leg, ...]]  # see `scene`


class Inexact(Exception):
    """The snapshot does not read back as the state that it was made of: a defect of ours. It must not be kept."""


class SavedCluster(Struct, frozen=True, array_like=True):
    """The state after the event `seq`, and where the ranks of its moves came from."""

    seq: int
    cluster: Cluster
    ways: tuple[tuple[JobId, int, tuple[Leg, ...]], ...]

    def known_ways(self) -> Ways:
        return {(job, number): legs for job, number, legs in self.ways}


def from_table(value: Any) -> Any:
    """A table as pairs, in its order, which decisions may depend on."""
    if isinstance(value, Table):
        return list(value.items())
    raise NotImplementedError(f"{type(value).__name__} cannot be kept in a snapshot")


def to_table(kind: type, value: Any) -> Any:
    if get_origin(kind) is not Table:
        raise NotImplementedError(f"{kind} cannot be read from a snapshot")
    key, item = get_args(kind)
    pairs = msgspec.convert(value, list[tuple[key, item]], dec_hook=to_table)  # type: ignore[valid-type]
    return Table(pairs)


# Sets have no order that lasts; tables have, and keep it.
_encoder = msgspec.msgpack.Encoder(enc_hook=from_table, order="deterministic")
_decoder = msgspec.msgpack.Decoder(SavedCluster, dec_hook=to_table)


def shape_of(kind: Any, seen: set[Any]) -> str:
    """The names and types of all fields of a kind of value, and of all kinds in it."""
    parts = [str(kind)]
    if kind not in seen:
        seen.add(kind)
        inner = list(get_args(kind))
        if isinstance(kind, type) and (dataclasses.is_dataclass(kind) or issubclass(kind, Struct)):
            hints = get_type_hints(kind)
            parts += sorted(hints)
            inner += [hints[name] for name in sorted(hints)]
        parts += [shape_of(one, seen) for one in inner]
    return "(" + " ".join(parts) + ")"


SHAPE = f"{RULES_VERSION}:" + hashlib.blake2b(shape_of(SavedCluster, set()).encode(), digest_size=16).hexdigest()


def encode(seq: int, cluster: Cluster, ways: Ways) -> bytes:
    """A snapshot that reads back exactly. Raises `Inexact`."""
    made = SavedCluster(seq, cluster, tuple((*key, legs) for key, legs in ways.items()))
    try:
        data = _encoder.encode(made)
        again = _decoder.decode(data)
    except (msgspec.MsgspecError, NotImplementedError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise Inexact(f"{type(error).__name__}: {error}") from error  # without a snapshot one can live
    # The bytes as well: a state is equal whatever its time and the order of its tables, but what follows is not.
    if again != made or _encoder.encode(again) != data:
        raise Inexact("it reads back as another state")
    return data


def digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def decode(data: bytes, found: bytes, shape: str) -> SavedCluster | None:
    """What was kept; None if it is damaged, or not ours to read."""
    if shape != SHAPE or digest(data) != found:
        return None
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError:
        return None
