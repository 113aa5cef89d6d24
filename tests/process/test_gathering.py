"""A large state comes from all who have it at once, each byte checked, whatever becomes of some of the sources."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
import torch
from msgspec.structs import replace

from tests.support.relay import Relay, flip
from torchrelay.protocol.messages.ids import Generation, Point, Rank
from torchrelay.protocol.messages.orders import Source
from torchrelay.wire.trust import trust
from torchrelay.worker.state.state import State
from torchrelay.worker.transfer import gathering, slices, stream, transfer
from torchrelay.worker.transfer.gathering import spread
from torchrelay.worker.transfer.transfer import Cancel, Received, StateServer, TransferCancelled, TransferFailed

pytestmark = pytest.mark.usefixtures("sent")
SECRET = trust.new_secret()
AT = Point(7, 1)
NOW = Generation(3)
SLICE = 1 << 18
SLICES = 24


def a_state(seed: int, *, plain: int = 0, size: int = SLICES * SLICE // 4) -> State:
    """Two dozen slices of a large tensor and small ones beside it, some with gaps; other values for another seed."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "small": [torch.randn(3, generator=generator) for _ in range(50)],
        "large": torch.randn(size - 5000, generator=generator),
        "gaps": torch.randn(60, 90, generator=generator)[:, ::3],
        "turned": torch.randn(40, 30, generator=generator).t(),
    }
    return State(extra={"tensors": tensors, "plain": [plain]})


Spoil = Callable[[bytes, int], bytes | None]


@dataclass
class Sources:
    """State servers of several ranks, each behind a relay, and what was told of them."""

    stack: ExitStack
    relays: list[Relay] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    failed: list[TransferFailed] = field(default_factory=list)

    def add(self, given: State, spoil: Spoil = lambda piece, _: piece) -> StateServer:
        server = StateServer(SECRET, wait_s=30)
        self.stack.callback(server.close)
        server.publish(NOW, AT, state=given)
        relay = Relay(server, spoil)
        self.stack.callback(relay.close)
        self.relays.append(relay)
        self.sources.append(replace(relay.source, rank=Rank(len(self.sources))))
        return server

    def fetch(self, into: State, **options: object) -> Received:
        given = {"timeout_s": 30, "failed": self.failed.append, **options}
        return transfer.fetch_state(self.sources, SECRET, NOW, AT, into, **given)  # type: ignore[arg-type]


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sources]:
    """No sources yet; slices are small, so that states of some MB have many."""
    monkeypatch.setattr(slices, "SLICE", SLICE)
    monkeypatch.setattr(transfer, "GATHERED", 4 * SLICE)
    with ExitStack() as stack:
        yield Sources(stack)


def paced(piece: bytes, _: int) -> bytes:
    """A link that is the same for all and slower than this machine, also when it is busy."""
    time.sleep(len(piece) / 4e6)
    return piece


def from_then_on(offset: int, spoil: Spoil) -> Spoil:
    """Pass on as it comes up to here, paced."""

    def spoiled(piece: bytes, at: int) -> bytes | None:
        return paced(piece, at) if at < offset else spoil(piece, at)

    return spoiled


# ---------------------------------------------------------------- from all of them


def test_it_comes_from_all_sources_in_equal_parts_bit_for_bit_and_in_place(several: Sources) -> None:
    given, taken = a_state(1), a_state(2)
    for _ in range(3):
        several.add(given, paced)
    before = [tensor.data_ptr() for tensor in taken.manifest()[1]]
    received = several.fetch(taken)
    assert taken.digest() == given.digest()
    assert [tensor.data_ptr() for tensor in taken.manifest()[1]] == before
    assert received.sources == (0, 1, 2)
    total = sum(received.shares.values())
    assert total == SLICES * SLICE - 5000 * 4 + 50 * 12 + 60 * 30 * 4 + 40 * 30 * 4
    assert all(0.2 < share / total < 0.47 for share in received.shares.values()), received.shares
    assert several.failed == []


def test_the_digest_is_the_same_from_however_many_sources(several: Sources) -> None:
    given = a_state(1)
    several.add(given)
    one = several.fetch(a_state(2))
    several.sources.clear()
    several.add(given, paced)
    several.add(given, paced)
    two = several.fetch(a_state(3))
    several.sources.clear()
    several.add(a_state(4))
    other = several.fetch(a_state(5))
    assert one.digest == two.digest != other.digest
    assert (one.sources, two.sources, one.size) == ((0,), (0, 1), two.size)


def test_a_faster_source_brings_more(several: Sources) -> None:
    given = a_state(1)
    several.add(given, lambda piece, at: paced(piece, at) and paced(piece, at) and paced(piece, at))
    several.add(given, paced)
    received = several.fetch(a_state(2))
    assert received.shares[Rank(1)] > 1.5 * received.shares.get(Rank(0), 0)


def test_progress_is_told_to_the_last_byte(several: Sources) -> None:
    several.add(a_state(1))
    several.add(a_state(1))
    told: list[tuple[int, int]] = []
    received = several.fetch(a_state(2), progress=lambda came, of: told.append((came, of)))
    assert told == sorted(told)
    assert told[-1] == (sum(received.shares.values()),) * 2


def test_a_small_state_comes_from_one_and_the_others_are_not_asked(several: Sources) -> None:
    given, taken = a_state(1, size=3 * SLICE // 4), a_state(2, size=3 * SLICE // 4)
    several.add(given)
    several.add(given)
    received = several.fetch(taken)
    assert taken.digest() == given.digest()
    assert received.sources == (0,)
    assert several.relays[1].passed == 0


def test_a_source_on_our_own_host_is_asked_first(several: Sources) -> None:
    given = a_state(1, size=3 * SLICE // 4)
    several.add(given)
    several.add(given)
    near = several.sources[1].address.replace("127.0.0.1", "localhost")
    several.sources[1] = replace(several.sources[1], address=near)
    assert several.fetch(a_state(2, size=3 * SLICE // 4), host="localhost").sources == (1,)


# ---------------------------------------------------------------- when sources fail


def test_a_source_that_dies_midway_leaves_its_slices_to_the_others(several: Sources) -> None:
    given, taken = a_state(1), a_state(2)
    for number in range(3):
        several.add(given, from_then_on(5 * SLICE // 2, lambda *_: None) if number == 1 else paced)
    received = several.fetch(taken)
    assert taken.digest() == given.digest()
    assert received.shares.get(Rank(1), 0) <= 2 * SLICE
    assert several.failed == [], "who breaks off is no liar"


def test_the_first_source_may_be_the_one_that_dies(several: Sources) -> None:
    given, taken = a_state(1), a_state(2)
    several.add(given, from_then_on(SLICE // 2, lambda *_: None))
    several.add(given, paced)
    received = several.fetch(taken)
    assert taken.digest() == given.digest()
    assert received.sources == (1,)


def test_a_source_that_stalls_holds_nobody_up(several: Sources) -> None:
    given, taken = a_state(1), a_state(2)
    for number in range(3):
        several.add(given, from_then_on(2 * SLICE, lambda *_: b"") if number == 2 else paced)
    start = time.monotonic()
    received = several.fetch(taken, stall_s=25.0)
    assert time.monotonic() - start < 10
    assert taken.digest() == given.digest()
    assert received.shares.get(Rank(2), 0) <= 2 * SLICE


def test_a_source_that_does_not_even_answer_holds_nobody_up(several: Sources) -> None:
    given, taken = a_state(1), a_state(2)
    several.add(given)
    several.add(given)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        several.sources.append(Source(Rank(7), f"127.0.0.1:{silent.getsockname()[1]}"))
        start = time.monotonic()
        several.fetch(taken, stall_s=25.0)
        assert time.monotonic() - start < 10
    assert taken.digest() == given.digest()


@pytest.mark.parametrize("liar", [0, 1])
def test_whose_bytes_differ_from_its_digest_is_named_and_all_it_brought_comes_from_others(
    several: Sources, liar: int
) -> None:
    def lie(piece: bytes, at: int) -> bytes | None:
        return flip(2 * SLICE)(paced(piece, at), at)

    given, taken = a_state(1), a_state(2)
    for number in range(3):
        several.add(given, lie if number == liar else paced)
    received = several.fetch(taken)
    assert taken.digest() == given.digest()
    assert liar not in received.shares
    assert [(one.source, one.mismatch) for one in several.failed] == [(liar, True)]
    assert "digest of slice" in several.failed[0].reason


def test_when_all_lie_nothing_is_believed(several: Sources) -> None:
    taken = a_state(2)
    for _ in range(2):
        several.add(a_state(1), flip(2 * SLICE))
    with pytest.raises(TransferFailed, match="digest") as caught:
        several.fetch(taken)
    assert caught.value.mismatch
    assert {one.source for one in several.failed} == {0, 1}
    assert taken.parts()["state['plain']"].give()["plain"] == [0]


def test_no_flipped_bit_is_ever_accepted(several: Sources) -> None:
    given = a_state(1, size=5 * SLICE // 4)
    honest, noticed = several.add(given), 0
    for spot in [*range(0, 400, 37), *range(400, 6 * SLICE, SLICE // 5)]:
        several.sources.clear()
        several.add(given, flip(spot))
        several.sources.append(Source(Rank(9), honest.address))
        taken = a_state(2, size=5 * SLICE // 4)
        try:
            several.fetch(taken, stall_s=0.3, timeout_s=5)
        except TransferFailed:
            noticed += 1
        else:
            assert taken.digest() == given.digest(), spot
            noticed += bool(several.failed)
        several.failed.clear()
    assert noticed > 10


def test_a_source_whose_state_is_laid_out_otherwise_brings_nothing(several: Sources) -> None:
    given, taken = a_state(1, plain=5), a_state(2)
    several.add(given, paced)
    several.add(a_state(1, plain=6), paced)
    several.add(given, paced)
    received = several.fetch(taken)
    assert received.sources == (0, 2)
    assert taken.digest() == given.digest()
    assert several.failed == []


@pytest.mark.parametrize("failing", [0, 1])
def test_who_was_not_asked_yet_takes_the_place_of_one_that_fails(
    several: Sources, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    monkeypatch.setattr(gathering, "MOST_SOURCES", 2)
    given, taken = a_state(1), a_state(2)
    for number in range(3):
        several.add(given, from_then_on(SLICE, lambda *_: None) if number == failing else paced)
    received = several.fetch(taken)
    assert taken.digest() == given.digest()
    assert Rank(2) in received.shares


def test_no_more_sources_than_needed_are_asked(several: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "MOST_SOURCES", 2)
    for _ in range(3):
        several.add(a_state(1), paced)
    assert several.fetch(a_state(2)).sources == (0, 1)
    assert several.relays[2].passed == 0


def test_without_any_source_left_it_has_failed(several: Sources) -> None:
    for _ in range(2):
        several.add(a_state(1), from_then_on(2 * SLICE, lambda *_: None))
    with pytest.raises(TransferFailed, match=r"closed the connection|broke") as caught:
        several.fetch(a_state(2))
    assert not caught.value.mismatch
    assert [thread for thread in threading.enumerate() if thread.name == gathering.THREAD] == []


def test_a_thread_that_cannot_be_started_is_done_without(several: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    given, taken = a_state(1), a_state(2)
    several.add(given)
    several.add(given)
    start, started = threading.Thread.start, list[str]()

    def limited(thread: threading.Thread) -> None:
        if thread.name == gathering.THREAD:
            if started:
                raise RuntimeError("can't start new thread")
            started.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    several.fetch(taken)
    assert taken.digest() == given.digest()


# ---------------------------------------------------------------- when it is over


def test_it_can_be_cancelled_and_nothing_is_written_afterwards(several: Sources) -> None:
    for _ in range(3):
        several.add(a_state(1), paced)
    taken, cancel = a_state(2), Cancel()

    def progress(came: int, _: int) -> None:
        if came > 4 * SLICE:
            cancel.cancel()

    with pytest.raises(TransferCancelled):
        several.fetch(taken, cancel=cancel, progress=progress)
    after = taken.digest()
    for relay in several.relays:
        relay.close()
    assert taken.digest() == after


def test_who_withdraws_its_state_is_left_alone_at_once(several: Sources) -> None:
    given, taken = a_state(1), a_state(2)
    servers = [several.add(given, paced) for _ in range(3)]
    withdrawn = list[float]()

    def progress(came: int, _: int) -> None:
        if came > 6 * SLICE and not withdrawn:
            begin = time.monotonic()
            servers[2].withdraw()
            withdrawn.append(time.monotonic() - begin)

    received = several.fetch(taken, progress=progress)
    assert taken.digest() == given.digest()
    assert withdrawn[0] < 5
    assert received.shares.get(Rank(2), 0) < 12 * SLICE


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (5, 2), (0, 1 << 40)])
def test_bytes_that_there_are_not_are_not_given(several: Sources, start: int, stop: int) -> None:
    server = several.add(a_state(1))
    host, port = server.address.rsplit(":", 1)
    line = stream.Stream(socket.create_connection((host, int(port))), stall_s=5, deadline=time.monotonic() + 5)
    nonce = trust.new_nonce()
    line.send(stream.Hello(stream.VERSION, NOW, nonce))
    challenge = line.receive()
    assert isinstance(challenge, stream.Challenge)
    proof = trust.prove(SECRET, nonce, challenge.nonce, stream.client_context(stream.PLAIN, NOW, "slices", AT))
    line.send(stream.Ask(proof, "slices", AT))
    assert isinstance(line.receive(), stream.Serving)
    line.receive_bytes(16)
    line.send_range(start, stop)
    with pytest.raises(stream.StreamBroken, match=r"closed|broke"):
        line.receive_bytes(1)
    line.close()


def test_the_first_sources_are_on_as_many_hosts_as_possible() -> None:
    given = [Source(Rank(rank), f"{host}:1") for rank, host in enumerate("aaabbc")]
    assert [source.rank for source in spread(given)] == [0, 3, 5, 1, 4, 2]
