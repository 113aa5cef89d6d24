"""A state on the same machine is read out of its source's memory: to the same bits, or not at all."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection

import pytest
import torch

from tests.support.relay import MakeRelay, flip, relays
from torchrelay.protocol.messages.ids import Generation, Point, Rank
from torchrelay.protocol.messages.orders import Source
from torchrelay.wire.trust import trust
from torchrelay.worker.state.state import State
from torchrelay.worker.transfer import neighbour, transfer
from torchrelay.worker.transfer.neighbour import MOST_VECTORS, PIECE, Reader, Shown, machine_id
from torchrelay.worker.transfer.stream import CHUNK
from torchrelay.worker.transfer.transfer import Cancel, Received, StateServer, TransferCancelled, TransferFailed

SECRET = b"s" * 32
AT = Point(7, 1)
NOW = Generation(3)


def a_state(seed: int, *, large: int = CHUNK + 5, gaps: bool = False) -> State:
    """Some 8 MB in large, small, many, turned, empty and equal tensors; other values for another seed."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    tensors = {
        "large": [random(large), random(large)],
        "small": [random(3) for _ in range(3 * MOST_VECTORS)],
        "turned": random(40, 30).t(),
        "empty": random(0),
        "flags": random(9) > 0,
    }
    if gaps:
        tensors["gaps"] = random(20, 30)[:, ::3]
    return State(extra={"tensors": tensors, "plain": {"seed": seed}})


@pytest.fixture
def server() -> Iterator[StateServer]:
    with ExitStack() as stack:
        one = StateServer(SECRET, wait_s=30)
        stack.callback(one.close)
        yield one


@pytest.fixture
def relay(server: StateServer) -> Iterator[MakeRelay]:
    with relays(server) as make:
        yield make


def source_of(server: StateServer) -> Source:
    return Source(Rank(4), server.address)


def fetch(source: Source, into: State, **options: object) -> Received:
    return transfer.fetch_state([source], SECRET, NOW, AT, into, timeout_s=20, **options)  # type: ignore[arg-type]


def test_it_is_read_bit_for_bit_and_hardly_a_byte_is_sent(server: StateServer, relay: MakeRelay) -> None:
    given, taken = a_state(1), a_state(2)
    server.publish(NOW, AT, state=given)
    counter = relay(lambda piece, _: piece)
    received = fetch(counter.source, taken)
    assert taken.digest() == given.digest()
    assert received.size > 2 * 4 * CHUNK
    assert counter.passed < CHUNK / 16


WAYS = ("gaps", "elsewhere", "turned off", "forbidden", "another process", "one at a time", "many places")


@pytest.mark.parametrize("way", WAYS)
def test_where_it_cannot_be_read_it_is_sent(
    way: str, server: StateServer, relay: MakeRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, taken = a_state(1, gaps=way == "gaps"), a_state(2, gaps=way == "gaps")
    if way == "elsewhere":
        monkeypatch.setattr("torchrelay.worker.transfer.request.machine_id", lambda: machine_id() + "7")
    elif way == "turned off":
        monkeypatch.setenv("TORCHRELAY_NEIGHBOURS", "0")
    elif way == "forbidden":
        monkeypatch.setattr(neighbour._libc, "process_vm_readv", lambda *_: -1)
    elif way == "another process":
        monkeypatch.setattr("torchrelay.worker.transfer.serving.os.getpid", os.getppid)
    elif way == "one at a time":
        server._permitting.acquire()
    elif way == "many places":
        monkeypatch.setattr(neighbour, "MAX_PLACES", 5)
    server.publish(NOW, AT, state=given)
    counter = relay(lambda piece, _: piece)
    fetch(counter.source, taken)
    assert taken.digest() == given.digest()
    assert counter.passed > 2 * 4 * CHUNK


def test_no_flipped_bit_leads_to_another_state(server: StateServer, relay: MakeRelay) -> None:
    given = a_state(1, large=1000)
    server.publish(NOW, AT, state=given)
    counter = relay(lambda piece, _: piece)
    fetch(counter.source, a_state(2, large=1000))
    refused = 0
    for spot in [*range(0, counter.passed, max(1, counter.passed // 60)), *range(counter.passed - 17, counter.passed)]:
        taken = a_state(2, large=1000)
        try:
            fetch(relay(flip(spot)).source, taken, stall_s=0.3)
        except TransferFailed:
            refused += 1
        else:
            assert taken.digest() == given.digest(), f"a bit flipped at byte {spot} of {counter.passed}"
    assert refused > 50


def test_what_is_written_while_it_is_read_is_found_out(server: StateServer) -> None:
    given = a_state(1, large=16 * CHUNK)
    server.publish(NOW, AT, state=given)
    last = given.manifest()[1][1]

    def write(came: int, _: int) -> None:
        if came <= PIECE:
            hashed.wait(10)
            last[-1] += 1

    hashed = threading.Event()
    waiting = neighbour._await_done

    def told(stream: object) -> None:
        hashed.set()
        waiting(stream)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbour, "_await_done", told)
        with pytest.raises(TransferFailed, match="digest") as caught:
            fetch(source_of(server), a_state(2, large=16 * CHUNK), progress=write)
    assert caught.value.mismatch


def test_a_withdrawn_state_is_read_no_more_and_that_is_no_mismatch(server: StateServer) -> None:
    given = a_state(1, large=16 * CHUNK)
    server.publish(NOW, AT, state=given)

    def withdraw(came: int, _: int) -> None:
        if came <= PIECE:
            server.withdraw()
            assert not server._readers
            given.manifest()[1][0].zero_()  # the source trains on

    with pytest.raises(TransferFailed) as caught:
        fetch(source_of(server), a_state(2, large=16 * CHUNK), progress=withdraw)
    assert not caught.value.mismatch


def test_a_fetch_can_be_cancelled_while_it_reads(server: StateServer) -> None:
    server.publish(NOW, AT, state=a_state(1, large=40 * CHUNK))
    cancel = Cancel()
    with pytest.raises(TransferCancelled):
        fetch(source_of(server), a_state(2, large=40 * CHUNK), cancel=cancel, progress=lambda *_: cancel.cancel())


def test_nothing_is_written_behind_the_back_of_who_was_told_of_an_end(
    server: StateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.publish(NOW, AT, state=a_state(1, large=16 * CHUNK))
    cancel, reading = Cancel(), set[int]()
    began, cancelled = threading.Event(), threading.Event()
    read = neighbour._libc.process_vm_readv

    def slowly(*asked: object) -> int:
        reading.add(threading.get_ident())
        began.set()
        cancelled.wait(10)
        count: int = read(*asked)
        reading.discard(threading.get_ident())
        return count

    def cut(came: int, _: int) -> None:
        if came <= PIECE:
            monkeypatch.setattr(neighbour._libc, "process_vm_readv", slowly)
        elif not cancel.cancelled:
            assert began.wait(10)
            cancel.cancel()
            threading.Timer(0.1, cancelled.set).start()

    monkeypatch.setattr(neighbour, "threads", lambda: 2)
    monkeypatch.setattr(neighbour, "SIGN_S", 0.0)
    with pytest.raises(TransferCancelled):
        fetch(source_of(server), a_state(2, large=16 * CHUNK), cancel=cancel, progress=cut)
    assert cancelled.is_set()
    assert not reading


def test_a_source_may_not_show_less_than_it_serves(server: StateServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.publish(NOW, AT, state=a_state(1))
    may = Reader.may

    def shortened(reader: Reader) -> bool:
        allowed = may(reader)
        reader._places.pop()
        return allowed

    monkeypatch.setattr(Reader, "may", shortened)
    with pytest.raises(TransferFailed, match="less than it serves"):
        fetch(source_of(server), a_state(2))


def serve(pipe: Connection) -> None:
    """In a process of its own: the state of seed 1, until the pipe is closed."""
    server = StateServer(SECRET)
    state = a_state(1, large=40 * CHUNK)
    server.publish(NOW, AT, state=state)
    pipe.send((server.address, state.digest()))
    pipe.poll(None)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fault", ["", "killed", "stopped"])
def test_a_source_in_another_process(fault: str) -> None:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    try:
        address, digest = pipe.recv()
        assert process.pid is not None
        pid = process.pid
        struck: list[float] = []

        def strike(*_: int) -> None:
            if fault and not struck:
                os.kill(pid, signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
                struck.append(time.monotonic())

        taken = a_state(2, large=40 * CHUNK)
        if not fault:
            fetch(Source(Rank(0), address), taken)
            assert taken.digest() == digest
            return
        with pytest.raises(TransferFailed) as caught:
            fetch(Source(Rank(0), address), taken, progress=strike, stall_s=0.5)
        assert time.monotonic() - struck[0] < 10
        assert not caught.value.mismatch
    finally:
        process.kill()
        process.join()


def test_a_machine_has_one_name() -> None:
    assert machine_id() == machine_id() != ""
    assert trust.NONCE_BYTES >= neighbour.NONCE_BYTES


@pytest.mark.parametrize("same", [True, False])
def test_memory_in_which_something_else_stands_is_of_another_process(same: bool) -> None:
    shown = Shown([torch.ones(3)])
    told = bytearray(shown.told())
    told[0] ^= 0 if same else 1
    reader = Reader(None, os.getpid(), told)  # type: ignore[arg-type]
    assert reader.may() is same
