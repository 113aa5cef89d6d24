"""A private record is whole with or without what was known at the return; anything else is refused."""

from __future__ import annotations

import pytest

from torchrelay.worker.record import AtGate, AtReturn, Private, decode_private, encode_gate, encode_return

GATE = b"".join(encode_gate([b"r", b"ng"], AtGate(b"then", b"place", None)))
RETURN = encode_return(AtReturn(b"result", b"now", {"a": "b"}))


def test_at_the_gate() -> None:
    record = decode_private(GATE)
    assert record == Private(b"rng", b"then", b"place", None, None)
    assert not record.returned


def test_when_the_call_has_returned() -> None:
    record = decode_private(GATE + RETURN)
    assert record == Private(b"rng", b"now", b"place", {"a": "b"}, b"result")
    assert record.returned


def test_a_state_that_has_not_changed_since_the_gate_is_not_written_twice() -> None:
    assert decode_private(GATE + encode_return(AtReturn(b"result", None, None))).state == b"then"


@pytest.mark.parametrize("data", [b"", b"abc", GATE[:-1], GATE + b"x", GATE + RETURN[:-1], b"\xff" * 40])
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=f"{len(data)} bytes that are no private record"):
        decode_private(data)
