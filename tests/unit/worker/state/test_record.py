"""A private record is whole with or without what was known at the return; anything else is refused."""

from __future__ import annotations

import struct

import msgspec
import pytest

from torchrelay.worker.state.record import (
    AtGate,
    AtReturn,
    Learned,
    Private,
    decode_private,
    encode_gate,
    encode_return,
)

LEARNED = {"step": Learned(7, 3, b"names", b"\0\1", b"\0")}
GATE = b"".join(encode_gate([b"r", b"ng"], AtGate(b"then", b"place", None, LEARNED, b"code")))
RETURN = encode_return(AtReturn(b"result", b"now", {"a": "b"}))


def test_at_the_gate() -> None:
    record = decode_private(GATE)
    assert record == Private(b"rng", b"then", b"place", None, None, LEARNED, code=b"code")
    assert not record.returned


def test_when_the_call_has_returned() -> None:
    record = decode_private(GATE + RETURN)
    assert record == Private(b"rng", b"now", b"place", {"a": "b"}, b"result", LEARNED, code=b"code")
    assert record.returned


def test_a_state_that_has_not_changed_since_the_gate_is_not_written_twice() -> None:
    assert decode_private(GATE + encode_return(AtReturn(b"result", None, None))).state == b"then"


def test_a_record_of_a_version_that_learned_nothing() -> None:
    old = msgspec.msgpack.encode([b"then", b"place", None])
    assert decode_private(struct.pack("<II", 3, len(old)) + b"rng" + old).learned == {}


@pytest.mark.parametrize("data", [b"", b"abc", GATE[:-1], GATE + b"x", GATE + RETURN[:-1], b"\xff" * 40])
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=f"{len(data)} bytes that are no private record"):
        decode_private(data)
