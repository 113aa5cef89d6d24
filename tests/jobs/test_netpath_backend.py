"""The backend "torchrelay" on CPU tensors: each collective beside Gloo's, trainings, and how it breaks."""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.scripts import netpath_actions as acts
from tests.scripts import netpath_below as below
from tests.scripts import netpath_training as training
from tests.scripts.groups_ranks import Failed, Troupe, troupe, until
from torchrelay.netpath.native import library

TWO_PATHS = {"TORCHRELAY_NET_PATHS": "127.0.1.1,127.0.2.1"}
SMALL, RING, SEGMENTS = 1000, 30_011, 500_009  # elements: from rank to rank; round the ring; in several segments
ENDED_S = 15.0  # how long whoever waits may take to hear of an abort: milliseconds, and the group's timeout is 60 s

if not library.PATH.is_file():
    pytest.skip("the network part is not built", allow_module_level=True)


def begin(world_size: int, timeout_s: float = 60.0, **environment: str) -> Iterator[Troupe]:
    """Connected ranks."""
    with troupe(world_size, **TWO_PATHS | environment) as ranks:
        ranks.do("call", acts.init, ranks.ranks[0].do("host_store"), timeout_s)
        yield ranks


@pytest.fixture(scope="module", params=[2, 3, 4])
def some(request: pytest.FixtureRequest) -> Iterator[Troupe]:
    yield from begin(request.param)


@pytest.fixture(scope="module")
def four() -> Iterator[Troupe]:
    yield from begin(4)


@pytest.fixture
def fresh(request: pytest.FixtureRequest) -> Iterator[Troupe]:
    """Three ranks that may be broken."""
    yield from begin(3, **getattr(request, "param", {}))


def blocked(ranks: Troupe, *waiting: int) -> None:
    """Until these ranks are in a collective that they cannot end."""
    for rank in waiting:
        ranks.ranks[rank].assert_busy(0.1)


def anew(ranks: Troupe, generation: int = 2) -> None:
    """All connect anew."""
    address = ranks.ranks[0].do("host_store")
    ranks.do("call", acts.connect, address, generation)


# ---------------------------------------------------------------- each collective, beside Gloo's

COLLECTIVES = [
    "all_reduce", "all_reduce_coalesced", "reduce", "broadcast", "all_gather", "all_gather_into", "reduce_scatter",
    "reduce_scatter_tensor", "gather", "scatter",
]  # fmt: skip


@pytest.mark.parametrize("elements", [1, SMALL, RING, SEGMENTS])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_gives_what_gloos_gives(some: Troupe, name: str, elements: int) -> None:
    assert sum(some.do("call", acts.compare, name, elements, torch.int64)) > 0


@pytest.mark.parametrize(
    ("name", "elements"), [("all_to_all_single", 1), ("all_to_all_single", 5000), ("functions", 7)]
)
def test_other_ways_give_what_gloos_give(some: Troupe, name: str, elements: int) -> None:
    assert sum(some.do("call", acts.compare, name, elements, torch.int64)) > 0


@pytest.mark.parametrize("name", ["all_gather_objects", "broadcast_objects"])
def test_objects_travel(some: Troupe, name: str) -> None:
    assert sum(some.do("call", acts.compare, name, SMALL, torch.float32)) > 0


@pytest.mark.parametrize("elements", [3, RING])
@pytest.mark.parametrize("op", ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"])
def test_whole_numbers_are_reduced_to_the_bit(four: Troupe, op: str, elements: int) -> None:
    four.do("call", acts.compare, "all_reduce", elements, torch.int32, op=op)
    four.do("call", acts.compare, "reduce", elements, torch.uint8, op=op)


@pytest.mark.parametrize("elements", [3, RING])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_fractions_are_reduced_as_gloo_does(four: Troupe, dtype: torch.dtype, elements: int) -> None:
    for op in ("SUM", "PRODUCT", "MIN", "MAX"):
        four.do("call", acts.compare, "all_reduce", elements, dtype, exact=False, op=op)
    four.do("call", acts.compare, "reduce_scatter_tensor", elements, dtype, exact=False)


@pytest.mark.parametrize("elements", [5, RING])
def test_an_average_is_the_sum_divided(four: Troupe, elements: int) -> None:
    four.do("call", acts.average, elements)


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.float8_e4m3fn, torch.int8])
def test_all_types_are_carried(four: Troupe, dtype: torch.dtype) -> None:
    four.do("call", acts.compare_bytes, "all_gather", SMALL, dtype)
    four.do("call", acts.compare_bytes, "broadcast", RING, dtype)


@pytest.mark.parametrize("elements", [3, RING])
def test_tensors_may_lie_anyhow(some: Troupe, elements: int) -> None:
    some.do("call", acts.compare, "odd_layouts", elements, torch.int64)


def test_bits_do_not_depend_on_the_rank_the_time_or_the_paths(four: Troupe) -> None:
    before = set(four.do("call", acts.digest_of_sums, SEGMENTS))
    four.do("call", acts.inject, "path1:down@0s+10s")
    try:
        during = set(four.do("call", acts.digest_of_sums, SEGMENTS))
    finally:
        four.do("call", acts.inject, "")
    assert len(before) == 1
    assert during == before


# ---------------------------------------------------------------- messages, meshes, futures


@pytest.mark.parametrize("elements", [1, 100, 1_000_000])
def test_messages_go_by_tag_and_also_to_oneself(some: Troupe, elements: int) -> None:
    world = some.world_size
    found = some.do("call", acts.ring_of_messages, elements)
    assert found == [elements * ((rank - 1) % world) for rank in range(world)]


def test_a_batch_of_messages(some: Troupe) -> None:
    world = some.world_size
    assert some.do("call", acts.batch) == [[float((rank - 1) % world)] * 10 for rank in range(world)]


def test_who_sends_first_is_heard_first_and_each_in_its_order(four: Troupe) -> None:
    found = four.do("call", acts.from_anybody, 20)[0]
    for rank in (1, 2, 3):
        assert [value for source, value in found if source == rank] == [100.0 * rank + number for number in range(20)]
    assert len(found) == 60


def test_meshes_and_dtensors(four: Troupe) -> None:
    # rows: ranks 0 and 2, 1 and 3; columns: ranks 0 and 1, 2 and 3
    assert four.do("call", acts.mesh) == [[2, 1], [4, 1], [2, 5], [4, 5]]


def test_what_is_chained_to_a_collective_may_wait_for_a_later_one(some: Troupe) -> None:
    assert some.do("call", acts.futures) == [3.0 * some.world_size] * some.world_size


def test_two_groups_are_used_by_two_threads(four: Troupe) -> None:
    four.do("call", acts.make_other)
    assert four.do("call", acts.many_at_once, 60) == [[6.0] * 60 + [10.0] * 60] * 4


def test_a_forked_child_ends_without_harm(four: Troupe) -> None:
    assert four.do("call", acts.fork) == [0] * 4
    assert four.do("call", acts.gate) == [4] * 4


def test_a_group_ends_and_another_begins(fresh: Troupe) -> None:
    fresh.do("call", acts.gate)
    fresh.do("call", acts.ring_of_messages, 10)
    fresh.do("call", acts.destroy_and_begin_anew, fresh.ranks[0].do("host_store"))
    assert fresh.do("call", acts.gate) == [3] * 3
    left = fresh.ranks[1].do("call", acts.threads)
    assert not [name for name in left if " tag " in name], left


# ---------------------------------------------------------------- training


def close(ours: list[tuple[int, list[float]]], theirs: list[tuple[int, list[float]]]) -> bool:
    return all(one == pytest.approx(other, rel=1e-4) for (_, one), (_, other) in zip(ours, theirs, strict=True))


def test_ddp_trains_as_on_gloo_and_twice_to_the_same_bits(four: Troupe) -> None:
    runs = [four.do("call", training.digest, "ddp", "torchrelay", 6) for _ in range(2)]
    assert runs[0] == runs[1]
    assert close(runs[0], four.do("call", training.digest, "ddp", "gloo", 6))


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_fsdp_trains_as_on_gloo_and_twice_to_the_same_bits(four: Troupe, shape: tuple[int, ...]) -> None:
    runs = [four.do("call", training.digest, "fsdp", "torchrelay", 5, shape) for _ in range(2)]
    assert runs[0] == runs[1]
    assert close(runs[0], four.do("call", training.digest, "fsdp", "gloo", 5, shape))


def test_a_communication_hook_is_called(four: Troupe) -> None:
    losses = four.do("call", training.ddp_with_hook, 5)
    assert all(torch.isfinite(torch.stack(one)).all() for one in losses)


def test_training_goes_on_over_lost_paths_to_the_same_bits(four: Troupe) -> None:
    calm = four.do("call", training.digest, "ddp", "torchrelay", 30)
    downs = [sum(path.downs for path in paths) for paths in four.do("call", acts.paths)]
    try:
        four.do("call", acts.inject, "path0:reset@0s+2s,path1:drop@1s+1s")
        stormy = four.do("call", training.digest, "ddp", "torchrelay", 30)
        until(lambda: all(more > few for more, few in zip(lost_of(four), downs, strict=True)))
    finally:
        four.do("call", acts.inject, "")
    assert stormy == calm


def lost_of(ranks: Troupe) -> list[int]:
    return [sum(path.downs for path in paths) for paths in ranks.do("call", acts.paths)]


# ---------------------------------------------------------------- when it breaks


@pytest.mark.parametrize("what", [acts.gate, acts.large])
def test_an_abort_ends_the_waiting_of_all(fresh: Troupe, what: Any) -> None:
    fresh.do("call", acts.gate)
    same = [one[2] for one in fresh.do("call", acts.state)]
    fresh.tell("call", what, ranks=[1, 2])
    blocked(fresh, 1, 2)
    aborted_at = fresh.ranks[1].control_do("call", acts.abort)
    with pytest.raises(Failed, match="the group was aborted") as failed:
        fresh.ranks[1].result(ENDED_S)
    assert failed.value.collective
    assert fresh.ranks[1].ended_at - aborted_at < ENDED_S
    # Who comes later fails, and then whoever waits for it.
    with pytest.raises(Failed, match=r"rank [12]: the message did not get through: the peer has closed"):
        fresh.ranks[0].do("call", what)
    (last,) = fresh.results([2], within_s=ENDED_S)
    assert isinstance(last, Failed) or (what is acts.gate and last == 3)  # it had heard from all
    anew(fresh)
    assert fresh.do("call", acts.gate) == [3] * 3
    assert [one[2] for one in fresh.do("call", acts.state)] == same


def test_an_abort_ends_ddp_and_messages(fresh: Troupe) -> None:
    fresh.tell("call", training.ddp_until_cut)
    until(lambda: all(puppet.control_do("call", training.steps) > 3 for puppet in fresh.ranks))
    aborted_at = fresh.ranks[2].control_do("call", acts.abort)
    for puppet in fresh.ranks:
        with pytest.raises(Failed, match=r"torchrelay\.netpath"):
            puppet.result(ENDED_S)
        assert puppet.ended_at - aborted_at < ENDED_S
    anew(fresh)
    fresh.tell("call", acts.sends_of_two, ranks=[1])
    blocked(fresh, 1)
    fresh.ranks[1].control_do("call", acts.abort)
    with pytest.raises(Failed, match="aborted"):
        fresh.ranks[1].result(ENDED_S)


def test_an_abort_ends_connecting(fresh: Troupe) -> None:
    fresh.do("call", acts.leave)
    address = fresh.ranks[0].do("host_store")
    fresh.do("call", acts.connect, address, 3, ranks=[1, 2])  # rank 0 does not come
    fresh.tell("call", acts.gate, ranks=[1, 2])
    blocked(fresh, 1, 2)
    aborted_at = fresh.ranks[2].control_do("call", acts.abort)
    with pytest.raises(Failed, match="aborted"):
        fresh.ranks[2].result(ENDED_S)
    assert fresh.ranks[2].ended_at - aborted_at < ENDED_S


def test_what_cpp_waits_for_fails_as_cpp_fails(fresh: Troupe) -> None:
    fresh.do("call", acts.gate)
    fresh.tell("call", acts.failed_future)
    fresh.ranks[0].result()
    blocked(fresh, 1, 2)
    fresh.ranks[1].control_do("call", acts.abort)
    assert (
        "torchrelay.netpath: the connections of group '0' are broken: the group was aborted" in fresh.ranks[1].result()
    )


def test_a_collective_that_takes_too_long_names_who_is_missing() -> None:
    for ranks in begin(3, timeout_s=3.0):
        ranks.do("call", acts.gate)
        ranks.tell("call", acts.gate, ranks=[1, 2])
        for failed in ranks.results([1, 2], within_s=30):
            assert isinstance(failed, Failed)
            assert re.search("allreduce number .* of group '0' has taken longer than 3 s: rank 0 has sent", failed.text)
        with pytest.raises(Failed, match="broken"):
            ranks.ranks[0].do("call", acts.gate)


def test_a_monitored_barrier_names_all_who_are_missing(fresh: Troupe) -> None:
    fresh.do("call", acts.monitored, 10)
    with pytest.raises(Failed, match=r"longer than 0\.2 s: ranks 1, 2 have not come"):
        fresh.ranks[0].do("call", acts.monitored, 0.2)


def test_tensors_of_different_sizes_are_an_error_on_all_ranks(fresh: Troupe) -> None:
    fresh.tell("call", acts.of_other_sizes)
    assert all(isinstance(answer, Failed) for answer in fresh.results(within_s=10))
    anew(fresh)
    fresh.tell("call", acts.send_wrong_size, ranks=[0, 1])
    assert "has sent 20 bytes, and there is room for 16" in str(fresh.results([1], within_s=10)[0])


def test_a_rank_that_breaks_off_before_its_greeting_is_not_waited_for(fresh: Troupe) -> None:
    """Its collective failed as soon as one other's part had come: the third has its connection, and no word on it."""
    fresh.tell("call", acts.gate, ranks=[1, 2])
    fresh.ranks[0].do("call", acts.break_off_at_the_door)
    for failed in fresh.results([1, 2], within_s=10):
        assert isinstance(failed, Failed)
        assert "broken" in failed.text


@pytest.mark.parametrize(
    ("action", "arguments", "text"),
    [
        (acts.on_another_device, (), "carries CPU tensors only: for GPUs use NCCL"),
        (acts.forbidden, ("BAND", torch.float32), "BAND cannot be done with torch.float32"),
        (acts.forbidden, ("SUM", torch.float8_e4m3fn), "SUM cannot be done with torch.float8_e4m3fn"),
    ],
)
def test_what_cannot_be_done_is_refused_and_harms_nobody(four: Troupe, action: Any, arguments: Any, text: str) -> None:
    with pytest.raises(Failed, match=text):
        four.ranks[1].do("call", action, *arguments)
    assert four.do("call", acts.gate) == [4] * 4


@pytest.mark.parametrize("fresh", [{"TORCHRELAY_NET_GIVEUP_S": "4"}], indirect=True)
def test_a_killed_rank_is_given_up_and_replaced(fresh: Troupe) -> None:
    fresh.do("call", acts.gate)
    fresh.ranks[1].kill()
    fresh.tell("call", acts.large, ranks=[0, 2])
    for failed in fresh.results([0, 2], within_s=40):
        assert isinstance(failed, Failed)
        assert "did not get through" in failed.text
    replacement = fresh.replace(1)
    replacement.do("call", acts.init)
    assert replacement.do("call", acts.gate) == 1  # nothing is done
    assert replacement.do("call", acts.state)[0]
    anew(fresh)
    assert fresh.do("call", acts.gate) == [3] * 3
    assert fresh.do("call", acts.large) == [3.0] * 3


# ---------------------------------------------------------------- below the groups


def test_an_attempt_to_connect_can_be_given_up() -> None:
    with troupe(1, **TWO_PATHS) as ranks:
        before, after = ranks.ranks[0].do("call", below.attempts_to_connect)
    assert before == 3
    assert after <= 2  # of each path one may have been on its way


def test_words_that_cannot_be_meant_are_refused() -> None:
    with troupe(1, **TWO_PATHS) as ranks:
        said = ranks.ranks[0].do("call", below.bad_words)
    assert said[0].startswith("5: this is no handle of version ")
    assert len(said) == 3
    assert all(one.startswith("5: ") for one in said)


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"TORCHRELAY_NET_PATHS": "203.0.113.7"}, "203.0.113.7, which is no address of this machine"),
        ({"TORCHRELAY_NET_PATHS": "nowhere0"}, "nowhere0: no interface of that name"),
        ({"TORCHRELAY_NET_DEAD_MS": "soon"}, "TORCHRELAY_NET_DEAD_MS is 'soon': give a number"),
        ({"TORCHRELAY_NET_DEAD_MS": "49"}, "TORCHRELAY_NET_DEAD_MS is '49': give a number from 50 to 600000"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(variables: dict[str, str], why: str) -> None:
    with troupe(1, **TWO_PATHS | variables) as ranks, pytest.raises(Failed, match=re.escape(why)):
        ranks.ranks[0].do("call", below.start)


# ---------------------------------------------------------------- strangers


def place_of(handle: str) -> tuple[str, int]:
    """Where whoever gave this handle listens: the first address in it, behind magic, version and token."""
    family, port, address = struct.unpack_from("!BxH4s", bytes.fromhex(handle), 4 + 4 + 16)
    assert family == 4
    return socket.inet_ntoa(address), port


def crc32c(data: bytes) -> int:
    """The checksum of RFC 3720, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def hello(token: bytes, version: int = 2) -> bytes:
    """The first words over a connection: see native/netpath/core/wire.h."""
    body = token + struct.pack("<II8x", 256 << 10, 0)

    def head(crc: int) -> bytes:
        return struct.pack("<IBBHQIIII", 0x004E5254 | version << 24, 1, 0, 1, 4711, 0, 32, 0, crc)

    return head(crc32c(head(0) + body)) + body


def answer_to(at: tuple[str, int], words: bytes) -> bytes:
    """What is said to a stranger before the end."""
    answer = b""
    with socket.create_connection(at, timeout=10) as stranger:
        stranger.sendall(words)
        try:
            while more := stranger.recv(4096):
                answer += more
        except ConnectionResetError:
            pass
    return answer


def test_strangers_are_refused(fresh: Troupe) -> None:
    fresh.do("call", acts.gate)
    at = place_of(fresh.ranks[0].do("call", acts.handles)[1])
    torn = hello(bytes(16))[:-1] + b"\x01"  # changed on its way: there is nobody to refuse
    for words in (b"GET / HTTP/1.1\r\n\r\n" * 4, b"\xff" * 1000, hello(bytes(16))[:40], torn):
        assert answer_to(at, words) == b""
    for words, reason in ((hello(bytes(16)), 1), (hello(bytes(16), version=1), 4)):  # a stranger; another version
        answer = answer_to(at, words)
        assert (len(answer), answer[4], answer[16]) == (32, 3, reason)
    assert fresh.do("call", acts.gate) == [3] * 3
    assert fresh.do("call", acts.large) == [3.0] * 3
