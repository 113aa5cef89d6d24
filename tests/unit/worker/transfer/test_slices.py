"""A state's bytes are cut without gap or overlap, the same at both ends; and who brings which is settled fairly."""

from __future__ import annotations

import threading
from itertools import pairwise
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrelay.protocol.messages.ids import Rank
from torchrelay.worker.tensors import memory
from torchrelay.worker.tensors.digest import Digest
from torchrelay.worker.transfer.gathering import Division
from torchrelay.worker.transfer.slices import Body, SlicedDigest

KINDS = ("dense", "turned", "gaps", "rows with gaps", "expanded", "flags", "empty")


def a_tensor(kind: str, rows: int, columns: int, seed: int) -> torch.Tensor:
    whole = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    match kind:
        case "turned":
            return whole.t()
        case "gaps":
            return whole[:, ::2]
        case "rows with gaps":
            return whole[:, : columns // 2 + 1]
        case "expanded":
            return whole[:1].expand(rows, columns)
        case "flags":
            return whole > 0
        case "empty":
            return whole[:0]
        case _:
            return whole


tensors = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(1, 12), st.integers(1, 12), st.integers(0, 1 << 20)), max_size=8
).map(lambda several: [a_tensor(*each) for each in several])


def whole(body: Body) -> bytes:
    return b"".join(body.outgoing(0, body.size)) if body.size else b""


@settings(max_examples=200, deadline=None)
@given(tensors, st.integers(1, 300))
def test_the_slices_are_the_whole_without_gap_or_overlap(given: list[torch.Tensor], most: int) -> None:
    body = Body(given)
    cuts = body.cuts(most)
    assert cuts[0] == 0
    assert cuts[-1] == body.size == sum(memory.size(tensor) for tensor in given)
    assert cuts == sorted(set(cuts))
    largest = max((memory.size(tensor) for tensor in given if not memory.divisible(tensor)), default=0)
    assert all(stop - start <= most + largest for start, stop in pairwise(cuts))
    assert b"".join(b"".join(body.outgoing(*each)) for each in pairwise(cuts)) == whole(body)


@settings(max_examples=100, deadline=None)
@given(tensors, st.integers(1, 300), st.randoms(use_true_random=False))
def test_slices_land_where_they_belong_in_whatever_order_they_come(
    given: list[torch.Tensor], most: int, chance: Random
) -> None:
    body = Body(given)
    sent = whole(body)
    targets = [torch.empty_strided(one.shape, one.stride(), dtype=one.dtype).zero_() for one in given]
    landing = Body(targets)
    slices = list(pairwise(landing.cuts(most)))
    assert slices == list(pairwise(body.cuts(most))), "both ends cut alike"
    chance.shuffle(slices)
    for start, stop in slices:
        at = start
        for view, filled in landing.incoming(start, stop):
            view[:] = sent[at : at + len(view)]
            at += len(view)
            if filled is not None:
                filled()
        assert at == stop
    assert all(torch.equal(one, target) for one, target in zip(given, targets, strict=True))


@settings(max_examples=100, deadline=None)
@given(tensors, st.integers(1, 300), st.integers(1, 500))
def test_the_digest_is_the_same_slice_by_slice_and_in_pieces_of_any_size(
    given: list[torch.Tensor], most: int, piece: int
) -> None:
    body = Body(given)
    cuts, data, head = body.cuts(most), whole(body), Digest()
    head.add(b"manifest")
    in_pieces, by_slices = SlicedDigest(head, cuts), SlicedDigest(head, cuts)
    for start in range(0, len(data), piece):
        in_pieces.add(data[start : start + piece])
    for start, stop in pairwise(cuts):
        one = Digest()
        one.add(data[start:stop])
        by_slices.add_slice(one.raw())
    assert in_pieces.text() == by_slices.text()


def test_every_bit_and_the_manifest_count_for_the_digest() -> None:
    def digest(head: bytes, values: torch.Tensor) -> str:
        body, first = Body([values]), Digest()
        first.add(head)
        found = SlicedDigest(first, body.cuts(64))
        for view in body.outgoing(0, body.size):
            found.add(view)
        return found.text()

    values = torch.arange(100, dtype=torch.int32)
    seen = {digest(b"a", values), digest(b"b", values)}
    for at in (0, 15, 16, 99):
        changed = values.clone()
        changed[at] ^= 1
        seen.add(digest(b"a", changed))
    assert len(seen) == 6


@pytest.mark.parametrize(("start", "stop"), [(-1, 5), (5, 5), (9, 5), (0, 10**9), (2**63, 2**64 - 1), (1, 20)])
def test_bytes_that_cannot_be_told_are_not_given(start: int, stop: int) -> None:
    body = Body([a_tensor("gaps", 4, 4, 1), a_tensor("dense", 4, 4, 2)])
    with pytest.raises(ValueError, match="asked for"):
        list(body.outgoing(start, stop))


# ---------------------------------------------------------------- who brings what


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def of(count: int, clock: Clock | None = None) -> Division:
    return Division([10] * count, clock or Clock())


def nothing() -> None:
    """What is done to cut it."""


def test_whoever_has_brought_one_gets_the_next() -> None:
    division = of(5)
    quick, slow = division.enter(Rank(1), nothing), division.enter(Rank(2), nothing)
    assert division.claim(slow, wait=True) == 0
    for number in (1, 2, 3, 4):
        assert division.claim(quick, wait=True) == number
        division.land(quick, number, b"%d" % number)
    assert division.claim(quick, wait=False) is None
    assert not division.complete
    division.land(slow, 0, b"0")
    assert division.complete
    assert division.claim(quick, wait=True) is None
    assert division.digests() == [b"0", b"1", b"2", b"3", b"4"]
    assert division.shares() == {1: 40, 2: 10}


def test_what_a_source_has_left_behind_is_given_to_others_and_what_it_brought_stays() -> None:
    division = of(3)
    left, other = division.enter(Rank(1), nothing), division.enter(Rank(2), nothing)
    division.claim(left, wait=True)
    division.land(left, 0, b"0")
    assert [division.claim(left, wait=True), division.claim(left, wait=True)] == [1, 2]
    assert division.claim(other, wait=False) is None
    division.leave(left)
    assert [division.claim(other, wait=True), division.claim(other, wait=True)] == [1, 2]
    division.land(other, 1, b"1")
    division.land(other, 2, b"2")
    assert division.shares() == {1: 10, 2: 20}


def test_all_that_a_distrusted_source_has_brought_is_brought_again() -> None:
    division = of(3)
    liar, other = division.enter(Rank(1), nothing), division.enter(Rank(2), nothing)
    for number in (0, 1):
        division.claim(liar, wait=True)
        division.land(liar, number, b"l")
    assert division.claim(liar, wait=True) == 2
    division.leave(liar, distrusted=True)
    division.leave(liar)
    for number in (0, 1, 2):
        assert division.claim(other, wait=True) == number
        division.land(other, number, b"o")
    assert division.shares() == {2: 30}
    assert division.digests() == [b"o"] * 3


@pytest.mark.parametrize(("came", "cut"), [(0, True), (1, True), (9, False)])
def test_an_idle_source_takes_over_from_one_that_would_take_much_longer(came: int, cut: bool) -> None:
    clock, cuts = Clock(), list[str]()
    division = of(3, clock)
    slow, idle = division.enter(Rank(1), lambda: cuts.append("slow")), division.enter(Rank(2), nothing)
    assert division.claim(slow, wait=True) == 0
    for number in (1, 2):
        division.claim(idle, wait=True)
        clock.now_s += 0.3
        division.land(idle, number, b"i")
    division.count(slow, 0, came)
    thread = threading.Thread(target=division.claim, args=(idle,), kwargs={"wait": True}, daemon=True)
    thread.start()
    if cut:
        division.wait(lambda: bool(cuts))
        assert cuts == ["slow"]
        assert division.claim(slow, wait=True) is None, "it is given nothing any more"
        assert division.claim(division.enter(Rank(3), nothing), wait=False) is None, "it may still write there"
        division.leave(slow)
    if not cut:
        thread.join(0.2)
        assert thread.is_alive()
        division.land(slow, 0, b"s")
    thread.join(10)
    assert not thread.is_alive()
    assert set(idle.held) == ({0} if cut else set())
    assert cuts == (["slow"] if cut else [])


def test_the_end_waits_for_whoever_may_still_write() -> None:
    cut = threading.Event()
    division = of(2)
    writing = division.enter(Rank(1), cut.set)
    division.claim(writing, wait=True)
    ending = threading.Thread(target=division.end, daemon=True)
    ending.start()
    assert cut.wait(10)
    ending.join(0.1)
    assert ending.is_alive()
    division.leave(writing)
    ending.join(10)
    assert not ending.is_alive()
    assert division.claim(division.enter(Rank(2), nothing), wait=True) is None
