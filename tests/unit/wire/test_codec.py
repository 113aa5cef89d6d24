"""The codec, the channel's and the link's messages: whole and equal, or a WireError."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.protocol.messages.events import AnyEvent, PrivateRecord, Tick, WorkerExited, WorkerReported
from torchrelay.protocol.messages.ids import Generation, JobId, NodeId, Point, Rank, WorkerId, WorkerPhase
from torchrelay.protocol.messages.orders import AnyOrder, Decide, Fence, Resume, Verdict
from torchrelay.wire.messages import codec
from torchrelay.wire.messages.channel import (
    Ack,
    EventFrame,
    JobTerms,
    OrderFrame,
    decode_to_agent,
    decode_to_orchestrator,
)
from torchrelay.wire.messages.codec import WireError, decode_event, decode_order, encode
from torchrelay.wire.messages.worker_frames import Welcome, decode_from_worker, decode_to_worker

EXITED = WorkerExited(
    worker=WorkerId("w"), node=NodeId("n"), signal=9, cause="SIGKILL", private=(PrivateRecord(Point(3, 1), b"\0\xff"),)
)
REPORTED = WorkerReported(
    job=JobId("j"),
    generation=Generation(2),
    worker=WorkerId("w"),
    rank=Rank(0),
    committed=None,
    phase=WorkerPhase.GATE,
    pending=Point(4),
)
DECIDE = Decide(
    node=NodeId("n"),
    worker=WorkerId("w"),
    job=JobId("j"),
    generation=Generation(2),
    rank=Rank(1),
    verdict=Verdict.ROLL_FORWARD,
    point=Point(4),
)
RESUME = Resume(
    node=NodeId("n"), worker=WorkerId("w"), job=JobId("j"), generation=Generation(2), rank=Rank(1), point=None
)
WELCOME = Welcome(
    job=JobId("j"),
    worker=WorkerId("w"),
    node=NodeId("n"),
    slot=1,
    host="127.0.0.1",
    secret=b"hush",
    patience_s=9.0,
    logs="/logs",
)


@pytest.mark.parametrize("event", [EXITED, REPORTED, Tick()])
def test_an_event_arrives_as_it_was_sent(event: AnyEvent) -> None:
    assert decode_event(encode(event)) == event
    assert decode_to_orchestrator(encode(EventFrame(7, event))) == EventFrame(7, event)


@pytest.mark.parametrize("order", [DECIDE, RESUME, Fence(node=NodeId("n"), worker=WorkerId("w"))])
def test_an_order_arrives_as_it_was_sent(order: AnyOrder) -> None:
    assert decode_order(encode(order)) == order
    assert decode_to_worker(encode(order)) == order
    assert decode_to_agent(encode(OrderFrame((order, order)))) == OrderFrame((order, order))


def test_a_welcome_arrives_whole_and_prints_without_its_secret() -> None:
    assert decode_to_worker(encode(WELCOME)) == WELCOME
    assert "hush" not in repr(WELCOME)


def test_terms_print_without_their_secret() -> None:
    from torchrelay.protocol.messages.events import JobSpec

    terms = JobTerms(spec=JobSpec(job=JobId("j"), world_size=1, nproc_per_node=1), secret=b"hush", patience_s=1.0)
    assert decode_to_agent(encode(terms)) == terms
    assert "hush" not in repr(terms)


def test_every_event_and_order_has_a_place_in_its_family() -> None:
    from torchrelay.protocol.messages import events, orders

    def leaves(kind: type) -> set[type]:
        below: list[type] = kind.__subclasses__()
        return {leaf for one in below for leaf in leaves(one)} if below else {kind}

    assert set(AnyEvent.__args__) == leaves(events.Event)
    assert {*AnyOrder.__args__, orders.Interrupts} == leaves(orders.Order), "and what says one of them to many"


def test_a_worker_may_only_say_what_workers_say() -> None:
    assert decode_from_worker(encode(REPORTED)) == REPORTED
    for event in (EXITED, Tick()):
        with pytest.raises(WireError):
            decode_from_worker(encode(event))


def test_values_are_not_coerced() -> None:
    raw = msgspec.msgpack.encode({"type": "Ack", "seq": "7"})
    with pytest.raises(WireError, match="message to an agent"):
        decode_to_agent(raw)
    assert decode_to_agent(msgspec.msgpack.encode({"type": "Ack", "seq": 7})) == Ack(7)


def test_an_order_is_not_an_event() -> None:
    with pytest.raises(WireError):
        decode_event(encode(DECIDE))


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_but_a_wire_error(data: bytes) -> None:
    for decode in (decode_event, decode_order, decode_to_agent, decode_to_orchestrator, decode_to_worker):
        with pytest.raises(WireError):
            decode(data)


@given(st.integers(0, 200), st.integers(0, 255))
def test_a_message_with_a_flipped_byte_is_another_message_or_a_wire_error(at: int, value: int) -> None:
    data = bytearray(encode(EventFrame(1, EXITED)))
    data[at % len(data)] = value
    try:
        decode_to_orchestrator(data)
    except WireError:
        pass


def test_deep_nesting_is_a_wire_error() -> None:
    with pytest.raises(WireError):
        decode_event(b"\x81\xa1x" * 100_000)


def test_messages_above_the_limit_are_neither_sent_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(EXITED)
    monkeypatch.setattr(codec, "MAX_MESSAGE", len(data) - 1)
    with pytest.raises(WireError, match=f"{len(data)} bytes, at most {len(data) - 1} are sent"):
        encode(EXITED)
    with pytest.raises(WireError, match="are read"):
        decode_event(data)
