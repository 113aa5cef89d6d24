"""State and records arrive whole, bit for bit, or not at all; and nobody waits for ever or gives to strangers."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from tests.support.relay import MakeRelay, flip, relays
from torchrelay.protocol.messages.ids import Generation, Point, Rank
from torchrelay.protocol.messages.orders import Source
from torchrelay.wire.trust import trust
from torchrelay.worker.state.state import State
from torchrelay.worker.transfer import serving, stream, transfer
from torchrelay.worker.transfer.stream import CHUNK
from torchrelay.worker.transfer.transfer import Cancel, Received, StateServer, TransferCancelled, TransferFailed

pytestmark = pytest.mark.usefixtures("sent")
SECRET = trust.new_secret()
AT = Point(7, 1)
NOW = Generation(3)


def a_state(seed: int, *, large: int = 3 * CHUNK // 4 + 5) -> State:
    """A state of small, large, odd and non-contiguous tensors, and plain values; other values for another seed."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    tensors = {
        "large": random(large),
        "small": [random(3) for _ in range(100)],
        "half": random(50).bfloat16(),
        "turned": random(40, 30).t(),
        "gaps": random(20, 30)[:, ::3],
        "empty": random(0),
        "one": random(1)[0],
        "flags": random(9) > 0,
    }
    return State(extra={"tensors": tensors, "plain": {"seed": seed, 3: [seed, None, 1.5]}})


@pytest.fixture
def server() -> Iterator[StateServer]:
    with ExitStack() as stack:
        one = StateServer(SECRET, wait_s=30)
        stack.callback(one.close)
        yield one


def source_of(server: StateServer, rank: int = 0) -> Source:
    return Source(Rank(rank), server.address)


def fetch(*sources: Source, into: State | None = None, timeout_s: float = 20.0, stall_s: float = 5.0) -> Received:
    into = into or a_state(2)
    return transfer.fetch_state(sources, SECRET, NOW, AT, into, timeout_s=timeout_s, stall_s=stall_s)


@pytest.fixture
def relay(server: StateServer) -> Iterator[MakeRelay]:
    with relays(server) as make:
        yield make


# ---------------------------------------------------------------- what arrives


def test_a_state_arrives_bit_for_bit_and_in_place(server: StateServer) -> None:
    given, taken = a_state(1), a_state(2)
    before = [tensor.data_ptr() for tensor in taken.manifest()[1] if tensor.numel()]
    server.publish(NOW, AT, state=given)
    received = fetch(source_of(server, 4), into=taken)
    assert taken.digest() == given.digest()
    assert [tensor.data_ptr() for tensor in taken.manifest()[1] if tensor.numel()] == before
    assert received.sources == (4,)
    assert received.size > 4 * CHUNK * 3 // 4
    assert len(received.digest) == 32
    assert received.took_s > 0


def test_progress_is_told_to_the_last_byte(server: StateServer) -> None:
    server.publish(NOW, AT, state=a_state(1))
    told: list[tuple[int, int]] = []
    transfer.fetch_state(
        [source_of(server)], SECRET, NOW, AT, a_state(2), progress=lambda came, of: told.append((came, of))
    )
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1]


def test_a_record_is_made_when_it_is_asked_for(server: StateServer) -> None:
    calls: list[int] = []

    def record() -> bytes:
        calls.append(1)
        return b"the place in the loops" * 100_000

    server.publish(NOW, AT, record=record)
    assert calls == []
    assert transfer.fetch_record([source_of(server)], SECRET, NOW, AT) == b"the place in the loops" * 100_000
    assert calls == [1]


def test_an_empty_record_is_a_record(server: StateServer) -> None:
    server.publish(NOW, AT, record=bytes)
    assert transfer.fetch_record([source_of(server)], SECRET, NOW, AT) == b""


def test_several_replacements_are_served_at_once(server: StateServer) -> None:
    given = a_state(1)
    server.publish(NOW, AT, state=given)
    states = [a_state(seed) for seed in range(2, 6)]
    threads = [threading.Thread(target=fetch, args=(source_of(server),), kwargs={"into": one}) for one in states]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert {one.digest() for one in states} == {given.digest()}


# ---------------------------------------------------------------- what must not be trusted


def test_no_flipped_bit_is_ever_accepted(server: StateServer, relay: MakeRelay) -> None:
    given = a_state(1)
    server.publish(NOW, AT, state=given)
    counter = relay(lambda piece, _: piece)
    fetch(counter.source)
    total = counter.passed
    spots = [*range(0, 200, 13), *range(200, total, total // 40), total - 16, total - 1]
    for spot in spots:
        with pytest.raises(TransferFailed) as caught:
            fetch(relay(flip(spot)).source, timeout_s=10, stall_s=0.3)
        assert caught.value.source == 5, f"a bit flipped at byte {spot} of {total}"


def test_a_flipped_bit_in_a_tensor_is_a_mismatch_and_nothing_is_committed(
    server: StateServer, relay: MakeRelay
) -> None:
    server.publish(NOW, AT, state=a_state(1))
    taken = a_state(2)
    with pytest.raises(TransferFailed, match="digest") as caught:
        fetch(relay(flip(3 * CHUNK)).source, into=taken)
    assert caught.value.mismatch
    assert taken.parts()["state['plain']"].give()["plain"]["seed"] == 2


def test_after_a_mismatch_the_next_source_is_not_asked_but_another_fetch_heals(
    server: StateServer, relay: MakeRelay
) -> None:
    given, taken = a_state(1), a_state(2)
    server.publish(NOW, AT, state=given)
    with pytest.raises(TransferFailed):
        fetch(relay(flip(3 * CHUNK)).source, source_of(server), into=taken)
    assert taken.digest() != given.digest()
    fetch(source_of(server), into=taken)
    assert taken.digest() == given.digest()


def test_a_source_that_breaks_off_has_failed_and_the_next_one_is_asked(server: StateServer, relay: MakeRelay) -> None:
    given, taken = a_state(1), a_state(2)
    server.publish(NOW, AT, state=given)
    broken = relay(lambda piece, offset: piece if offset < CHUNK else None)
    with pytest.raises(TransferFailed, match="closed the connection") as caught:
        fetch(broken.source, into=taken)
    assert not caught.value.mismatch
    again = relay(lambda piece, offset: piece if offset < CHUNK else None)
    received = fetch(again.source, source_of(server, 2), into=taken)
    assert received.sources == (2,)
    assert taken.digest() == given.digest()


def test_a_source_that_ends_before_its_digest_has_failed(server: StateServer, relay: MakeRelay) -> None:
    server.publish(NOW, AT, record=lambda: b"x" * 1000)
    whole = relay(lambda piece, _: piece)
    transfer.fetch_record([whole.source], SECRET, NOW, AT)
    end = whole.passed - 8
    short = relay(lambda piece, offset: piece[: max(0, end - offset)])
    with pytest.raises(TransferFailed, match="no byte came"):
        transfer.fetch_record([short.source], SECRET, NOW, AT, 10, stall_s=0.3)


def test_a_source_that_falls_silent_is_given_up_after_the_stall_time(server: StateServer, relay: MakeRelay) -> None:
    server.publish(NOW, AT, state=a_state(1))
    silent = relay(lambda piece, offset: piece if offset < CHUNK else b"")
    start = time.monotonic()
    with pytest.raises(TransferFailed, match=r"no byte came for 0\.4 s"):
        fetch(silent.source, stall_s=0.4)
    assert time.monotonic() - start < 20


def test_a_source_that_drips_is_given_up_at_the_deadline(server: StateServer, relay: MakeRelay) -> None:
    server.publish(NOW, AT, state=a_state(1))

    def drip(piece: bytes, offset: int) -> bytes:
        if offset < CHUNK:
            return piece
        time.sleep(0.2)
        return piece[:1]

    start = time.monotonic()
    with pytest.raises(TransferFailed, match="the time for it is over"):
        fetch(relay(drip).source, timeout_s=1.0, stall_s=5.0)
    assert 0.9 < time.monotonic() - start < 5


def test_a_state_that_does_not_fit_is_refused_by_name(server: StateServer) -> None:
    server.publish(NOW, AT, state=State(model=torch.nn.Linear(3, 4)))
    with pytest.raises(TransferFailed, match=r"model\.weight is \[4, 2\] float32 here and \[4, 3\]"):
        fetch(source_of(server), into=State(model=torch.nn.Linear(2, 4)))


# ---------------------------------------------------------------- who may ask, and for what


def test_a_client_without_the_secret_is_not_served(server: StateServer) -> None:
    server.publish(NOW, AT, record=lambda: b"private")
    with pytest.raises(TransferFailed, match="could not prove"):
        transfer.fetch_record([source_of(server)], trust.new_secret(), NOW, AT)


@pytest.mark.parametrize("stolen", [True, False])
def test_a_client_that_cannot_prove_itself_gets_nothing_even_if_it_goes_on(server: StateServer, stolen: bool) -> None:
    # The client above leaves when the server's proof is wrong for it; this one does not care.
    server.publish(NOW, AT, record=lambda: b"private")
    host, port = server.address.rsplit(":", 1)
    line = stream.Stream(socket.create_connection((host, int(port))), stall_s=5, deadline=time.monotonic() + 5)
    nonce = trust.new_nonce()
    line.send(stream.Hello(stream.VERSION, NOW, nonce))
    challenge = line.receive()
    assert isinstance(challenge, stream.Challenge)
    context = stream.client_context(stream.PLAIN, NOW, "record", AT)
    proof = challenge.proof if stolen else trust.prove(trust.new_secret(), nonce, challenge.nonce, context)
    line.send(stream.Ask(proof, "record", AT))
    with pytest.raises(stream.StreamBroken, match=r"closed|broke"):
        line.receive()
    line.close()


def test_a_server_without_the_secret_is_not_believed() -> None:
    with ExitStack() as stack:
        false = StateServer(trust.new_secret())
        stack.callback(false.close)
        false.publish(NOW, AT, state=a_state(1))
        with pytest.raises(TransferFailed, match="could not prove that it belongs to this job"):
            fetch(source_of(false))


@pytest.mark.parametrize(
    ("generation", "point", "reason"),
    [
        (Generation(2), AT, "generation 2 is over: this worker is in 3"),
        (NOW, Point(8), r"this worker is at 7\+1, not at 8"),
        (NOW, Point(7), r"this worker is at 7\+1, not at 7"),
    ],
)
def test_another_generation_or_point_is_refused_at_once(
    server: StateServer, generation: Generation, point: Point, reason: str
) -> None:
    server.publish(NOW, AT, state=a_state(1))
    with pytest.raises(TransferFailed, match=reason):
        transfer.fetch_state([source_of(server)], SECRET, generation, point, a_state(2))


@pytest.mark.parametrize(
    "opening", [b"GET / HTTP/1.1\r\n\r\n", struct.pack("!I", 1 << 31), b"\x00\x00\x00\x05hello", b""]
)
def test_a_stranger_is_sent_away_soon(server: StateServer, monkeypatch: pytest.MonkeyPatch, opening: bytes) -> None:
    host, port = server.address.rsplit(":", 1)
    with monkeypatch.context() as patch:
        patch.setattr(serving, "GREETING_S", 0.3)
        with socket.create_connection((host, int(port)), timeout=10) as stranger:
            stranger.sendall(opening)
            try:
                assert stranger.recv(1) == b""
            except ConnectionResetError:
                pass  # it had not read all that we sent
    server.publish(NOW, AT, record=lambda: b"still here")
    assert transfer.fetch_record([source_of(server)], SECRET, NOW, AT) == b"still here"


def test_strangers_are_not_let_in_without_end_and_keep_nobody_out(
    server: StateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "MAX_STRANGERS", 3)
    monkeypatch.setattr(serving, "GREETING_S", 60.0)
    host, port = server.address.rsplit(":", 1)
    with ExitStack() as stack:
        several = [stack.enter_context(socket.create_connection((host, int(port)), timeout=10)) for _ in range(8)]
        for one in several[:5]:
            assert one.recv(1) == b"", "the oldest goes when there is one more"
        server.publish(NOW, AT, record=lambda: b"still here")
        assert transfer.fetch_record([source_of(server)], SECRET, NOW, AT) == b"still here"
        several[-1].settimeout(0.5)
        with pytest.raises(TimeoutError):
            several[-1].recv(1)  # one that was let in, and is waited for


def test_no_more_clients_are_served_than_a_worker_can_bear(
    server: StateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "MAX_CLIENTS", 0)
    host, port = server.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=5) as one:
        assert one.recv(1) == b""


def test_the_server_listens_on_the_given_address_only(server: StateServer) -> None:
    assert server.address.startswith("127.0.0.1:")
    assert server._listening.getsockname()[0] == "127.0.0.1"


# ---------------------------------------------------------------- when


def test_a_request_waits_for_what_is_not_published_yet(server: StateServer) -> None:
    given, taken = a_state(1), a_state(2)
    server.publish(Generation(2), Point(1), state=a_state(3))  # of the generation before
    thread = threading.Thread(target=fetch, args=(source_of(server),), kwargs={"into": taken})
    thread.start()
    server.publish(NOW, AT, record=lambda: b"record")  # the state comes at another moment
    thread.join(0.7)
    assert thread.is_alive()
    server.publish(NOW, AT, state=given)
    thread.join(20)
    assert taken.digest() == given.digest()
    assert transfer.fetch_record([source_of(server)], SECRET, NOW, AT) == b"record"


def test_waiting_longer_than_a_stall_is_no_stall(server: StateServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "SIGN_OF_LIFE_S", 0.05)
    timer = threading.Timer(2.5, server.publish, (NOW, AT), {"record": lambda: b"late"})
    timer.start()
    assert transfer.fetch_record([source_of(server)], SECRET, NOW, AT, stall_s=1.5) == b"late"
    timer.join()


def test_what_is_never_published_is_refused_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "SIGN_OF_LIFE_S", 0.05)
    with ExitStack() as stack:
        server = StateServer(SECRET, wait_s=0.2)
        stack.callback(server.close)
        with pytest.raises(TransferFailed, match="was not published"):
            fetch(source_of(server))


def test_withdrawing_cuts_a_transfer_and_returns_when_nobody_reads(server: StateServer, relay: MakeRelay) -> None:
    server.publish(NOW, AT, state=a_state(1, large=40 * CHUNK))
    under_way, go_on = threading.Event(), threading.Event()

    def hold(piece: bytes, offset: int) -> bytes:
        if offset > CHUNK:
            under_way.set()
            go_on.wait(20)
        return piece

    held = relay(hold)
    failed: list[TransferFailed] = []

    def run() -> None:
        try:
            fetch(held.source, into=a_state(2, large=40 * CHUNK), stall_s=1.0)
        except TransferFailed as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert under_way.wait(20)
    assert server._readers
    start = time.monotonic()
    server.withdraw()
    assert not server._readers
    assert time.monotonic() - start < 5
    go_on.set()
    thread.join(20)
    assert len(failed) == 1
    assert not failed[0].mismatch


def test_a_withdrawn_state_is_waited_for_again(server: StateServer) -> None:
    server.publish(NOW, AT, state=a_state(1))
    server.withdraw()
    with pytest.raises(TransferFailed, match=r"no byte came|time for it is over"):
        fetch(source_of(server), timeout_s=0.8, stall_s=0.4)


def test_a_later_generation_replaces_what_was_offered(server: StateServer) -> None:
    given = a_state(1)
    server.publish(NOW, AT, record=lambda: b"old", state=given)
    server.publish(Generation(4), AT, state=given)
    with pytest.raises(TransferFailed, match="generation 3 is over"):
        fetch(source_of(server))
    transfer.fetch_state([source_of(server)], SECRET, Generation(4), AT, a_state(2))


def test_closing_lets_go_of_who_waits(server: StateServer) -> None:
    failed: list[TransferFailed] = []

    def run() -> None:
        try:
            fetch(source_of(server))
        except TransferFailed as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    deadline = time.monotonic() + 10
    while not server._clients and time.monotonic() < deadline:
        time.sleep(0.005)
    server.close()
    thread.join(10)
    assert len(failed) == 1
    with pytest.raises(TransferFailed, match="cannot be reached"):
        fetch(source_of(server))


@pytest.mark.parametrize("when", ["before", "stalled"])
def test_a_fetch_can_be_cancelled_from_another_thread(server: StateServer, relay: MakeRelay, when: str) -> None:
    server.publish(NOW, AT, state=a_state(1))
    silent = relay(lambda piece, offset: piece if offset < CHUNK else b"")
    cancel = Cancel()
    if when == "before":
        cancel.cancel()
    else:
        timer = threading.Timer(0.3, cancel.cancel)
        timer.start()
    start = time.monotonic()
    with pytest.raises(TransferCancelled):
        transfer.fetch_state([silent.source, source_of(server)], SECRET, NOW, AT, a_state(2), cancel=cancel, stall_s=40)
    assert time.monotonic() - start < 20


def test_nobody_to_fetch_from_is_an_error_of_the_caller() -> None:
    with pytest.raises(ValueError, match="nobody"):
        fetch()


def test_a_source_that_cannot_be_reached_is_passed_over(server: StateServer) -> None:
    server.publish(NOW, AT, state=a_state(1))
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    received = fetch(Source(Rank(1), f"127.0.0.1:{port}"), source_of(server, 2))
    assert received.sources == (2,)


def test_a_forked_child_does_not_keep_the_port(server: StateServer) -> None:
    # When the rank is killed nobody shuts its socket down: a copy in a child would go on listening for nobody.
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write_end, b"open" if server._listening.fileno() >= 0 else b"shut")
        os._exit(0)
    os.close(write_end)
    assert os.read(read_end, 4) == b"shut"
    os.close(read_end)
    os.waitpid(child, 0)
    server.publish(NOW, AT, record=lambda: b"the parent goes on")
    assert transfer.fetch_record([source_of(server)], SECRET, NOW, AT) == b"the parent goes on"


def test_an_example_is_given_at_any_time(server: StateServer) -> None:
    server.example = lambda: b"what it looks like"
    assert transfer.fetch_example([source_of(server)], SECRET) == b"what it looks like"
    server.publish(NOW, AT, lambda: b"record")
    assert transfer.fetch_example([source_of(server)], SECRET) == b"what it looks like"


def test_who_has_no_example_says_so_and_the_next_is_asked(server: StateServer) -> None:
    with pytest.raises(TransferFailed, match="has not called a step yet"):
        transfer.fetch_example([source_of(server)], SECRET)
    other = StateServer(SECRET)
    other.example = lambda: b"shown"
    assert transfer.fetch_example([source_of(server), source_of(other, 1)], SECRET) == b"shown"
    other.close()


def test_an_example_is_not_for_strangers(server: StateServer) -> None:
    server.example = lambda: b"shown"
    with pytest.raises(TransferFailed):
        transfer.fetch_example([source_of(server)], trust.new_secret())


@pytest.mark.parametrize("want", ["lane", "lane x", "lane -1", "example 3", ""])
def test_what_nobody_knows_is_not_given(want: str) -> None:
    assert not serving._known(want)
