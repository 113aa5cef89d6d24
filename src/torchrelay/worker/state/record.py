"""Record: a rank's private record, which no replica has. Written at a call's gate, supplemented when it has returned.

    u32 length of the random state, u32 length of the next, the random state, `AtGate`, and `AtReturn` if the worker
    lived to see the return

The two are written apart since most of a record is random state, which is the same at both moments.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import Struct

from torchrelay.worker.state.lent import Lent

_HEAD = struct.Struct("<II")
MOST_VALUES = 16 << 10  # bytes that a record of a snapshot is larger at most


class Learned(Struct, array_like=True, frozen=True):
    """What the calls of one kind have shown of themselves so far: see `redo`."""

    calls: int
    looks: int  # at calls, from their entry to their gate
    names: bytes = b""  # a digest of the names that the others are about, those of buffers and those of parts
    moving: bytes = b""  # for each buffer, by name, 1 if a call changes it, 2 if it is only written to
    copied: bytes = b""  # for each part that is looked at, by name, 1 if a call changes it before its gate


class AtGate(Struct, array_like=True):
    """What is known at the gate."""

    state: bytes  # see `private`
    place: bytes  # see `cursor`
    late: dict[str, str] | None  # see `late`; None as long as it is not known
    learned: dict[str, Learned] = {}  # by the kind of call
    code: bytes = b""  # digests of the source files that were loaded: see `program`


class AtReturn(Struct, array_like=True):
    """What has become known when the call has returned."""

    result: bytes
    state: bytes | None  # None: as at the gate
    late: dict[str, str] | None
    values: bytes = b""  # with a snapshot: those of the state at that return, see `returned`


class Told(Struct, array_like=True):
    """What a rank that stands at a safepoint tells a replacement of its own last call."""

    call: bytes  # see `cursor`
    lent: Lent  # what the update has changed of what objects keep in attributes


@dataclass(frozen=True)
class Private:
    """A whole record."""

    rng: bytes  # as it is when the call returns, too: nothing after the gate may draw
    state: bytes
    place: bytes
    late: dict[str, str] | None
    result: bytes | None  # of the last call; None if it had not returned
    learned: dict[str, Learned] = field(default_factory=dict)
    values: bytes = b""  # see `AtReturn`
    lent: tuple[Lent, ...] = ()  # if the last call had not returned: by other ranks
    code: bytes = b""

    @property
    def returned(self) -> bool:
        """Whether the last call had returned."""
        return self.result is not None


_at_gate = msgspec.msgpack.Decoder(AtGate)
_told = msgspec.msgpack.Decoder(Told)
_at_return = msgspec.msgpack.Decoder(AtReturn)


def encode_gate(rng: Sequence[bytes | memoryview], gate: AtGate) -> tuple[bytes | memoryview, ...]:
    """The record at the gate, in parts to be written one after the other. `rng`: see `random_state.parts`."""
    data = msgspec.msgpack.encode(gate)
    return _HEAD.pack(sum(map(len, rng)), len(data)), *rng, data


def encode_return(part: AtReturn) -> bytes:
    """What is to be put behind the record at the gate."""
    return msgspec.msgpack.encode(part)


def decode_told(data: bytes) -> Told:
    """Raises `ValueError` for bytes that are none."""
    try:
        return _told.decode(data)
    except msgspec.DecodeError as error:
        raise ValueError(f"{len(data)} bytes that tell of no call: {error}") from error


def decode_private(data: bytes) -> Private:
    """Raises `ValueError` for bytes that are no record."""
    try:
        rng_size, size = _HEAD.unpack_from(data)
        begin = _HEAD.size + rng_size
        end = begin + size
        rng = data[_HEAD.size : begin]
        gate = _at_gate.decode(data[begin:end])
        if len(data) <= end:
            return Private(rng, gate.state, gate.place, gate.late, None, gate.learned, code=gate.code)
        back = _at_return.decode(data[end:])
    except (msgspec.DecodeError, struct.error) as error:
        raise ValueError(f"{len(data)} bytes that are no private record: {error}") from error
    state = gate.state if back.state is None else back.state
    return Private(rng, state, gate.place, back.late, back.result, gate.learned, back.values, code=gate.code)


def with_values(data: bytes, values: bytes) -> bytes:
    """The record of a call that has returned, with the values of the state at its return."""
    rng_size, size = _HEAD.unpack_from(data)
    end = _HEAD.size + rng_size + size
    if len(data) <= end or len(values) > MOST_VALUES:
        return data
    back = _at_return.decode(data[end:])
    return data[:end] + encode_return(AtReturn(back.result, back.state, back.late, values))
