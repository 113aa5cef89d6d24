"""What tests of the backend "torchrelay" let puppets do; the first argument is the puppet's `Actions`.

The default group is ours; what Gloo would have done is asked of a group of Gloo's over the same ranks.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.scripts.groups_ranks import Actions
from torchrelay.netpath import backend
from torchrelay.netpath.backend import TorchrelayGroup
from torchrelay.netpath.native import binding
from torchrelay.netpath.transport.direct import others


def init(actions: Actions, address: str = "", timeout_s: float = 60.0, reference: bool = True) -> None:
    """The default group, and one of Gloo's to compare with. Without an address: alone."""
    backend.make_alone(not address)
    store = meeting(address, "first") if address else dist.HashStore()
    dist.init_process_group(
        "torchrelay",
        store=store,
        rank=actions.rank,
        world_size=actions.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    if reference and address:
        actions.kept["gloo"] = dist.new_group(backend="gloo")


def meeting(address: str, name: str) -> dist.Store:
    host, _, port = address.rpartition(":")
    return dist.PrefixStore(name, dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=30)))


def world() -> TorchrelayGroup:
    group = dist.group.WORLD
    assert isinstance(group, TorchrelayGroup)
    return group


# ---------------------------------------------------------------- each collective, beside Gloo's

Result = list[torch.Tensor]
ROUGHLY = {torch.float16: 4e-3, torch.bfloat16: 3e-2}  # some roundings, which come in another order
OPS = {name: getattr(dist.ReduceOp, name) for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")}


def values(rank: int, elements: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Random values of a rank, of which products of a few do not overflow."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.rand(elements, generator=generator, dtype=torch.float64).add(0.5).to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, (elements,), generator=generator).bool()
    return torch.randint(1, 4, (elements,), generator=generator).to(dtype)


def all_reduce(a: Actions, group: Any, elements: int, dtype: torch.dtype, op: str = "SUM") -> Result:
    tensor = values(a.rank, elements, dtype)
    dist.all_reduce(tensor, OPS[op], group)
    return [tensor]


def all_reduce_coalesced(a: Actions, group: Any, elements: int, dtype: torch.dtype) -> Result:
    tensors = [values(a.rank, elements + extra, dtype, extra) for extra in range(3)]
    opts = torch._C._distributed_c10d.AllreduceCoalescedOptions()
    group.allreduce_coalesced(tensors, opts).wait()
    return tensors


def reduce(a: Actions, group: Any, elements: int, dtype: torch.dtype, op: str = "SUM") -> Result:
    tensor = values(a.rank, elements, dtype)
    dist.reduce(tensor, a.world_size - 1, OPS[op], group)
    return [tensor] if a.rank == a.world_size - 1 else []


def broadcast(a: Actions, group: Any, elements: int, dtype: torch.dtype) -> Result:
    found = []
    for root in range(a.world_size):
        tensor = values(a.rank, elements, dtype, root)
        dist.broadcast(tensor, root, group)
        found.append(tensor)
    return found


def all_gather(a: Actions, group: Any, elements: int, dtype: torch.dtype) -> Result:
    found = [torch.zeros(elements, dtype=dtype) for _ in range(a.world_size)]
    dist.all_gather(found, values(a.rank, elements, dtype), group)
    return found


def all_gather_into(a: Actions, group: Any, elements: int, dtype: torch.dtype) -> Result:
    found = torch.zeros(elements * a.world_size, dtype=dtype)
    group._allgather_base(found, values(a.rank, elements, dtype)).wait()
    return [found]


def all_gather_objects(a: Actions, group: Any, elements: int, dtype: torch.dtype) -> Result:
    found: list[Any] = [None] * a.world_size
    dist.all_gather_object(found, {"rank": a.rank, "values": values(a.rank, elements, dtype)}, group)
    assert [one["rank"] for one in found] == list(range(a.world_size))
    return [one["values"] for one in found]


def broadcast_objects(a: Actions, group: Any, elements: int, dtype: torch.dtype) -> Result:
    found: list[Any] = [values(a.rank, elements, dtype)]
    dist.broadcast_object_list(found, 1, group)
    return found


def reduce_scatter(a: Actions, group: Any, elements: int, dtype: torch.dtype, op: str = "SUM") -> Result:
    found = torch.zeros(elements, dtype=dtype)
    parts = [values(a.rank, elements, dtype, salt) for salt in range(a.world_size)]
    dist.reduce_scatter(found, parts, OPS[op], group)
    return [found, *parts]  # which must be as they were


def reduce_scatter_tensor(a: Actions, group: Any, elements: int, dtype: torch.dtype, op: str = "SUM") -> Result:
    found = torch.zeros(elements, dtype=dtype)
    opts = torch._C._distributed_c10d.ReduceScatterOptions()
    opts.reduceOp = OPS[op]
    whole = values(a.rank, elements * a.world_size, dtype)
    group._reduce_scatter_base(found, whole, opts).wait()
    return [found, whole]


def gather(a: Actions, group: Any, elements: int, dtype: torch.dtype) -> Result:
    found = [torch.zeros(elements, dtype=dtype) for _ in range(a.world_size)] if a.rank == 1 else None
    dist.gather(values(a.rank, elements, dtype), found, 1, group)
    return found or []


def scatter(a: Actions, group: Any, elements: int, dtype: torch.dtype) -> Result:
    found = torch.zeros(elements, dtype=dtype)
    parts = [values(0, elements, dtype, salt) for salt in range(a.world_size)] if a.rank == 0 else None
    dist.scatter(found, parts, 0, group)
    return [found]


def all_to_all_single(a: Actions, group: Any, elements: int, dtype: torch.dtype) -> Result:
    """Rank r sends r + s rows to rank s."""
    out = [a.rank + other for other in range(a.world_size)]
    given = values(a.rank, sum(out) * elements, dtype).view(sum(out), elements)
    found = torch.zeros(sum(out), elements, dtype=dtype)  # as many as are sent: the matrix is symmetric
    dist.all_to_all_single(found, given, out, out, group)
    return [found]


def functions(a: Actions, group: Any, elements: int, dtype: torch.dtype) -> Result:
    """What DTensor and compiled code call."""
    mine = values(a.rank, elements * a.world_size, dtype)
    found = [
        functional.all_reduce(mine, "sum", group),
        functional.all_gather_single(mine, 0, group),
        functional.reduce_scatter_single(mine, "sum", 0, group),
        functional.all_to_all_single(mine, None, None, group),
        functional.broadcast(mine, 1, group),
        *functional.all_reduce_coalesced([mine, mine[:1]], "sum", group),
        *functional.all_gather_single_coalesced([mine, mine[:3]], group),
    ]
    return [functional.wait_tensor(one) for one in found]


def compare(actions: Actions, name: str, elements: int, dtype: torch.dtype, exact: bool = True, **how: Any) -> int:
    """Do a collective in both groups; their results must be equal. Returns how many tensors these are."""
    collective: Callable[..., Result] = globals()[name]
    ours = collective(actions, world(), elements, dtype, **how)
    theirs = collective(actions, actions.kept["gloo"], elements, dtype, **how)
    for one, other in zip(ours, theirs, strict=True):
        same = torch.equal(one, other) if exact else torch.allclose(one, other, rtol=ROUGHLY.get(dtype, 1e-5))
        assert same, f"{name} of {elements} {dtype}: {one.flatten()[:8]} and Gloo's {other.flatten()[:8]}"
    return len(ours)


def odd_layouts(a: Actions, group: Any, elements: int, dtype: torch.dtype) -> Result:
    """Tensors that do not lie in one stretch, that need gradients, or that are empty."""
    columns = values(a.rank, elements * 2, dtype).view(elements, 2)
    found = columns.t() if group is world() else columns.t().contiguous()  # which Gloo wants
    dist.all_reduce(found, group=group)
    whole = torch.zeros(a.world_size, elements, dtype=dtype)
    parts = [whole[rank] if group is not world() else whole.t().contiguous().t()[rank] for rank in range(a.world_size)]
    dist.all_gather(parts, values(a.rank, elements, dtype), group)
    empty = torch.zeros(0, dtype=dtype)
    dist.all_reduce(empty, group=group)
    parameter = torch.nn.Parameter(values(a.rank, elements, torch.float32))
    version = parameter._version
    dist.broadcast(parameter, 0, group)
    assert parameter._version == version  # autograd need not know
    return [found.contiguous(), *parts, empty, parameter.data]


# ---------------------------------------------------------------- from one rank to another


def ring_of_messages(a: Actions, elements: int) -> float:
    """Each sends to the next and to itself, out of order by tag, and from non-contiguous memory."""
    right, left = (a.rank + 1) % a.world_size, (a.rank - 1) % a.world_size
    grid = torch.full((elements, 2), float(a.rank))
    sent = [dist.isend(grid[:, tag], right, tag=tag) for tag in range(2)]
    sent.append(dist.isend(torch.full((elements,), 7.0), a.rank, tag=5))
    found = [torch.zeros(elements) for _ in range(3)]
    for place, (tag, source) in enumerate(((1, left), (0, left), (5, a.rank))):
        dist.recv(found[place], source, tag=tag)
    for work in sent:
        assert work is not None
        work.wait()
    assert all((one == left).all() for one in found[:2]), found
    assert (found[2] == 7).all()
    return found[0].sum().item()


def batch(a: Actions) -> list[float]:
    right, left = (a.rank + 1) % a.world_size, (a.rank - 1) % a.world_size
    found = torch.zeros(10)
    ops = [dist.P2POp(dist.irecv, found, left), dist.P2POp(dist.isend, torch.full((10,), float(a.rank)), right)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return found.tolist()


def from_anybody(a: Actions, rounds: int) -> list[tuple[int, float]]:
    """Rank 0 takes what comes, from whomever; the others send, each in its own order."""
    if a.rank:
        for number in range(rounds):
            dist.send(torch.full((3,), 100.0 * a.rank + number), 0)
        return []
    found = []
    for _ in range(rounds * (a.world_size - 1)):
        tensor = torch.zeros(3)
        found.append((dist.recv(tensor), tensor[0].item()))
    return found


def send_wrong_size(a: Actions) -> None:
    if a.rank == 0:
        dist.send(torch.zeros(5), 1)
        dist.barrier()
    else:
        dist.recv(torch.zeros(4), 0)


# ---------------------------------------------------------------- meshes


def mesh(a: Actions) -> list[float]:
    """Sums over rows and columns of a mesh of 2 x 2, and a DTensor that is laid out anew."""
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    sums = []
    for name in ("row", "column"):
        one = torch.full((1,), float(a.rank))
        dist.all_reduce(one, group=square.get_group(name))
        sums.append(one.item())
    whole = torch.arange(64.0).view(8, 8)
    spread = distribute_tensor(whole, square, [Shard(0), Shard(1)])
    assert torch.equal(spread.full_tensor(), whole)
    turned = spread.redistribute(square, [Replicate(), Shard(0)])
    assert isinstance(turned, DTensor)
    assert torch.equal((turned @ turned).full_tensor(), whole @ whole)
    return sums


# ---------------------------------------------------------------- futures and order


def futures(_a: Actions) -> float:
    """What is chained to a collective may wait for one that was begun after it, or begin one, in Python and in C++."""
    first, second, third = (torch.ones(1000) for _ in range(3))
    work, later = world().allreduce([first]), world().allreduce([second])

    def chained(future: Any) -> torch.Tensor:
        sums: torch.Tensor = future.value()[0] + later.get_future().wait()[0]
        own = world().allreduce([third])
        own.wait()
        return sums + third

    total: torch.Tensor = work.get_future().then(chained).wait()
    assert work.is_completed()
    assert work.is_success()
    return total[0].item()


def failed_future(a: Actions) -> str:
    """What C++ would see of a collective that fails."""
    tensor = torch.ones(1)
    future = world().allreduce([tensor]).get_future() if a.rank else None
    if future is None:
        return "not there"
    try:
        future.wait()
    except RuntimeError as error:
        return str(error)
    return "no error"


def many_at_once(a: Actions, number: int) -> list[float]:
    """Asynchronous collectives of several groups from two threads; each group's in the same order on all ranks."""
    other = a.kept["other"]
    sums: dict[int, list[torch.Tensor]] = {0: [], 1: []}

    def begin(place: int, group: Any) -> None:
        works = []
        for count in range(number):
            tensor = torch.full((count * 40 + 1,), float(a.rank + place))
            sums[place].append(tensor)
            works.append(dist.all_reduce(tensor, group=group, async_op=True))
        for work in works:
            work.wait()

    thread = threading.Thread(target=begin, args=(1, other))
    thread.start()
    begin(0, None)
    thread.join(30)
    assert not thread.is_alive()
    return [tensor[-1].item() for place in (0, 1) for tensor in sums[place]]


def make_other(a: Actions) -> None:
    a.kept["other"] = dist.new_group()


# ---------------------------------------------------------------- the life of a group


def gate(_a: Actions) -> float:
    one = torch.ones(1, dtype=torch.int32)
    world().allreduce([one]).wait()
    return one.item()


def large(a: Actions, elements: int = 4_000_000) -> float:
    tensor = torch.full((elements,), float(a.rank))
    dist.all_reduce(tensor)
    return tensor[-1].item()


def digest_of_sums(a: Actions, elements: int) -> int:
    """Of sums whose bits depend on the order."""
    import xxhash

    found = []
    for salt in range(3):
        for number in (elements, 999):
            tensor = values(a.rank, number, torch.float32, salt)
            dist.all_reduce(tensor)
            found.append(tensor)
    return xxhash.xxh3_64_intdigest(b"".join(one.numpy().tobytes() for one in found))


def sends_of_two(_a: Actions) -> None:
    """Rank 1 waits for a message that nobody sends."""
    dist.recv(torch.zeros(3), 0)


def abort(_a: Actions) -> float:
    begin = time.monotonic()
    world().abort()
    return begin


def break_off_at_the_door(_a: Actions) -> None:
    """Let all others connect; connect to them, and break all off before a greeting has gone out."""
    mesh, until = world()._connections.mesh, time.monotonic() + 30
    assert mesh is not None
    for peer in others(mesh):
        mesh.of(peer, until)
    for peer in others(mesh):
        handle = world().get_group_store().get(f"netpath/{peer}")
        connecting = binding.Connecting(bytes.fromhex(handle.decode()), mesh._label)
        while (comm := connecting.poll()) is None:
            mesh._rest(0.001, until, peer)
        comm.abort()
        comm.close()
    mesh.break_off("it was broken off at the door")


def connect(_a: Actions, address: str, generation: int) -> None:
    world().connect(meeting(address, f"generation {generation}"))


def leave(_a: Actions) -> None:
    world().leave()


def state(_a: Actions) -> tuple[bool, str, int]:
    return world().alone, world().broken, id(world())


def handles(_a: Actions) -> list[str]:
    """All ranks' handles, as they stand in the store."""
    store = world().get_group_store()
    return [store.get(f"netpath/{rank}").decode() for rank in range(world().size())]


def paths(_a: Actions) -> list[binding.Path]:
    return binding.paths()


def inject(_a: Actions, faults: str) -> None:
    binding.inject(faults)


def collectives_begun(_a: Actions) -> int:
    return world()._get_sequence_number_for_group()


def monitored(_a: Actions, seconds: float) -> None:
    world().monitored_barrier(timedelta(seconds=seconds), wait_all_ranks=True)


def of_other_sizes(a: Actions) -> None:
    dist.all_reduce(torch.zeros(1000 + a.rank))


def on_another_device(_a: Actions) -> None:
    dist.all_reduce(torch.zeros(3, device="meta"))


def forbidden(_a: Actions, op: str, dtype: torch.dtype) -> None:
    dist.all_reduce(torch.zeros(3, dtype=dtype), getattr(dist.ReduceOp, op))


def fork(_a: Actions) -> int:
    """A child that ends as Python ends, with its handlers, as a DataLoader's might. Returns its exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with pytest.raises(dist.DistBackendError, match="belongs to the process that this one was forked from"):
                world().allreduce([torch.ones(1)])
            world().shutdown()
            atexit._run_exitfuncs()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def destroy_and_begin_anew(a: Actions, address: str) -> None:
    before = world()
    dist.destroy_process_group()
    with pytest.raises(dist.DistBackendError, match="group '0' was destroyed"):
        before.allreduce([torch.ones(1)])
    store = meeting(address, "second")
    dist.init_process_group("torchrelay", store=store, rank=a.rank, world_size=a.world_size)


def threads(_a: Actions) -> list[str]:
    return sorted(thread.name for thread in threading.enumerate())


def average(a: Actions, elements: int) -> None:
    tensor = values(a.rank, elements, torch.float64)
    wanted = sum(values(rank, elements, torch.float64) for rank in range(a.world_size)) / a.world_size
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    assert torch.allclose(tensor, wanted, rtol=1e-14)


def compare_bytes(a: Actions, name: str, elements: int, dtype: torch.dtype) -> None:
    """Types that Gloo does not know: compared with their bytes, which it does."""
    collective: Callable[..., Result] = globals()[name]
    ours = collective(a, world(), elements, dtype)
    wanted = [values(rank, elements, dtype, salt) for rank, salt in sources(a, name)]
    for one, other in zip(ours, wanted, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def sources(a: Actions, name: str) -> list[tuple[int, int]]:
    """Whose values, with which salt, the results are."""
    return [(rank, rank if name == "broadcast" else 0) for rank in range(a.world_size)]
