"""The torch.distributed backend "torchrelay" for CPU tensors: collectives over several network paths at once.

    import torchrelay.netpath.backend            registers it
    torch.distributed.init_process_group("torchrelay")

A path that is lost costs a blink and no error. Results have the same bits on all ranks, whatever the time and the
paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from torchrelay.netpath import tensors
from torchrelay.netpath.collectives import collectives
from torchrelay.netpath.group import NAME, PathGroup
from torchrelay.netpath.tensors import Tensors, Written, flat, only, only_list, rows
from torchrelay.netpath.transport import direct
from torchrelay.netpath.transport.mesh import Mesh
from torchrelay.netpath.transport.messages import Messages, Wish
from torchrelay.netpath.transport.reduction import reduction
from torchrelay.netpath.transport.work import Work

_c10d: Any = _distributed_c10d  # the stubs do not know all options
SUM = dist.ReduceOp.SUM


def _options(kind: Any, given: Any, timeout: timedelta | None = None) -> Any:
    """Options as torch gives them. In their place may stand what they are about: a root's rank, or an operation."""
    if not hasattr(given, "timeout"):
        about, given = given, kind()
        if isinstance(about, int):
            given.rootRank = about
        elif about is not None:
            given.reduceOp = about
    if timeout is not None:
        given.timeout = timeout
    return given


class TorchrelayGroup(PathGroup):
    """A process group on CPU tensors. Collectives run one at a time, in the order in which they are called."""

    # ------------------------------------------------------------ reducing

    def allreduce(self, given: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        tensor = only("allreduce", given)
        opts = _options(_c10d.AllreduceOptions, opts, timeout)
        combined = reduction(opts.reduceOp, tensor.dtype, self.size())
        written = Written([tensor])

        def do(mesh: Mesh, until: float) -> None:
            collectives.all_reduce(mesh, written.parts[0], combined, until)
            written.put_back()

        return self._begin("allreduce", [tensor], do, opts)

    def allreduce_coalesced(self, given: Tensors, opts: Any = None) -> Work:
        tensors.checked("allreduce_coalesced", given)
        opts = _options(_c10d.AllreduceCoalescedOptions, opts)
        kinds: dict[torch.dtype, Tensors] = {}
        for tensor in given:
            kinds.setdefault(tensor.dtype, []).append(tensor.data)
        combined = {dtype: reduction(opts.reduceOp, dtype, self.size()) for dtype in kinds}

        def do(mesh: Mesh, until: float) -> None:
            for dtype, some in kinds.items():
                joined = torch.cat([tensor.reshape(-1) for tensor in some])
                collectives.all_reduce(mesh, joined, combined[dtype], until)
                for tensor, part in zip(some, torch.split(joined, [tensor.numel() for tensor in some]), strict=True):
                    tensor.copy_(part.view(tensor.shape))

        return self._begin("allreduce_coalesced", given, do, opts)

    def reduce(self, given: Any, opts: Any = None, op: Any = SUM, timeout: timedelta | None = None) -> Work:
        tensor = only("reduce", given)
        if isinstance(opts, int):
            opts = _options(_c10d.ReduceOptions, opts)
            opts.reduceOp = op
        opts = _options(_c10d.ReduceOptions, opts, timeout)
        combined = reduction(opts.reduceOp, tensor.dtype, self.size())
        written = Written([tensor])

        def do(mesh: Mesh, until: float) -> None:
            collectives.reduce(mesh, written.parts[0], opts.rootRank, combined, until)
            if mesh.rank == opts.rootRank:
                written.put_back()

        return self._begin("reduce", [tensor], do, opts)

    def reduce_scatter(self, given: Any, lists: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        inputs = only_list("reduce_scatter", lists, self.size())
        pairs = [(only("reduce_scatter", given), [flat(part) for part in inputs])]
        return self._reduce_scatter(pairs, _options(_c10d.ReduceScatterOptions, opts, timeout))

    def reduce_scatter_single(self, result: torch.Tensor, values: torch.Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([result], [values], opts)

    def reduce_scatter_single_coalesced(self, results: Tensors, values: Tensors, opts: Any = None) -> Work:
        tensors.checked("reduce_scatter", (*results, *values))
        cut = [list(rows("reduce_scatter", flat(whole), self.size())) for whole in values]
        return self._reduce_scatter(list(zip(results, cut, strict=True)), _options(_c10d.ReduceScatterOptions, opts))

    def _reduce_scatter(self, pairs: list[tuple[torch.Tensor, Tensors]], opts: Any) -> Work:
        for result, blocks in pairs:
            tensors.alike("reduce_scatter", [result, *blocks])
            if blocks[self.rank()].numel() != result.numel():
                raise ValueError(
                    f"reduce_scatter: {blocks[self.rank()].numel()} elements for a result of {result.numel()}"
                )
        results = [result for result, _ in pairs]
        combined = [reduction(opts.reduceOp, result.dtype, self.size()) for result in results]
        written = Written(results)

        def do(mesh: Mesh, until: float) -> None:
            for (_, blocks), part, one in zip(pairs, written.parts, combined, strict=True):
                collectives.reduce_scatter(mesh, blocks, part, one, until)
            written.put_back()

        return self._begin("reduce_scatter", results, do, opts)

    # ------------------------------------------------------------ bringing

    def broadcast(self, given: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        tensor = only("broadcast", given)
        opts = _options(_c10d.BroadcastOptions, opts, timeout)
        written = Written([tensor])

        def do(mesh: Mesh, until: float) -> None:
            collectives.broadcast(mesh, written.parts[0], opts.rootRank, until)
            if mesh.rank != opts.rootRank:
                written.put_back()

        return self._begin("broadcast", [tensor], do, opts)

    def allgather(  # type: ignore[override]
        self, lists: Any, given: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        pairs = [(only_list("allgather", lists, self.size()), only("allgather", given))]
        return self._all_gather(pairs, _options(_c10d.AllgatherOptions, opts, timeout))

    def allgather_coalesced(self, lists: Sequence[Tensors], given: Tensors, opts: Any = None) -> Work:
        pairs = [([row[number] for row in lists], mine) for number, mine in enumerate(given)]
        return self._all_gather(pairs, _options(_c10d.AllgatherOptions, opts))

    def all_gather_single(self, result: torch.Tensor, mine: torch.Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([result], [mine], opts)

    def all_gather_single_coalesced(self, results: Tensors, given: Tensors, opts: Any = None) -> Work:
        tensors.checked("allgather", (*results, *given))
        whole = Written(results)
        cut = [list(rows("allgather", part, self.size())) for part in whole.parts]
        return self._all_gather(list(zip(cut, given, strict=True)), _options(_c10d.AllgatherOptions, opts), whole)

    def _all_gather(
        self, pairs: Sequence[tuple[Tensors, torch.Tensor]], opts: Any, whole: Written | None = None
    ) -> Work:
        for outputs, mine in pairs:
            tensors.checked("allgather", (*outputs, mine))
            tensors.alike("allgather", [mine, *outputs])
        results = [output for outputs, _ in pairs for output in outputs]
        written = Written(results)

        def put_back() -> None:
            written.put_back()
            if whole is not None:
                whole.put_back()

        def do(mesh: Mesh, until: float) -> None:
            for number, (_, mine) in enumerate(pairs):
                blocks = written.parts[number * mesh.size : (number + 1) * mesh.size]
                collectives.all_gather(mesh, flat(mine), blocks, until)
            put_back()

        def alone() -> None:
            for number, part in enumerate(written.parts):
                part.copy_(flat(pairs[number // self.size()][1]))
            put_back()

        return self._begin("allgather", results, do, opts, alone)

    def gather(self, lists: Any, given: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        opts = _options(_c10d.GatherOptions, opts, timeout)
        mine = only("gather", given)
        here = self.rank() == opts.rootRank
        outputs = only_list("gather", lists, self.size()) if here else []
        tensors.alike("gather", [mine, *outputs])
        written = Written(outputs)

        def do(mesh: Mesh, until: float) -> None:
            collectives.gather(mesh, flat(mine), written.parts, opts.rootRank, until)
            written.put_back()

        def alone() -> None:
            for part in written.parts:
                part.copy_(flat(mine))
            written.put_back()

        return self._begin("gather", outputs, do, opts, alone)

    def scatter(self, given: Any, lists: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        opts = _options(_c10d.ScatterOptions, opts, timeout)
        result = only("scatter", given)
        here = self.rank() == opts.rootRank
        inputs = only_list("scatter", lists, self.size()) if here else []
        tensors.alike("scatter", [result, *inputs])
        written = Written([result])

        def do(mesh: Mesh, until: float) -> None:
            collectives.scatter(mesh, [flat(part) for part in inputs], written.parts[0], opts.rootRank, until)
            written.put_back()

        def alone() -> None:
            if here:
                result.data.copy_(inputs[self.rank()])

        return self._begin("scatter", [result], do, opts, alone)

    def alltoall(  # type: ignore[override]
        self, outputs: Tensors, inputs: Tensors, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        opts = _options(_c10d.AllToAllOptions, opts, timeout)
        into = Written(only_list("alltoall", outputs, self.size()))
        out = [flat(part) for part in only_list("alltoall", inputs, self.size())]
        return self._all_to_all(out, into, into.parts, outputs, opts)

    def all_to_all_single(  # type: ignore[override]
        self,
        result: torch.Tensor,
        values: torch.Tensor,
        result_splits: Sequence[int],
        splits: Sequence[int],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        what, count = "alltoall", self.size()
        tensors.checked(what, (result, values))
        into = Written([result])
        parts = tensors.by_splits(what, into.parts[0], result.shape, result_splits, count)
        out = tensors.by_splits(what, flat(values), values.shape, splits, count)
        return self._all_to_all(out, into, parts, [result], _options(_c10d.AllToAllOptions, opts, timeout))

    def _all_to_all(self, out: Tensors, into: Written, parts: Tensors, results: Tensors, opts: Any) -> Work:
        tensors.alike("alltoall", [*out, *parts])

        def do(mesh: Mesh, until: float) -> None:
            collectives.all_to_all(mesh, out, parts, until)
            into.put_back()

        return self._begin("alltoall", results, do, opts)

    # ------------------------------------------------------------ barriers

    def barrier(  # type: ignore[override]
        self, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        opts = _options(_c10d.BarrierOptions, opts, timeout)
        return self._begin("barrier", [], direct.barrier, opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names, on rank 0, who has not come in time. Raises `Broken`."""
        opts = _options(_c10d.BarrierOptions, None, timeout)
        opts.asyncOp = False

        def do(mesh: Mesh, until: float) -> None:
            direct.monitored_barrier(mesh, until, all_ranks=wait_all_ranks)

        self._begin("monitored_barrier", [], do, opts).wait()

    # ------------------------------------------------------------ from one rank to another

    def send(self, given: Any, to: int, tag: int = 0) -> Work:
        tensor = only("send", given)
        tensors.tagged("send", tag)

        def begin(messages: Messages, wish: Wish) -> None:
            messages.send(wish, to, tag)

        return self._send_or_receive(f"send to rank {to}", tensor, begin)

    def recv(self, given: Any, by: int, tag: int = 0) -> Work:
        tensors.tagged("recv", tag)

        def begin(messages: Messages, wish: Wish) -> None:
            messages.receive(wish, by, tag)

        return self._send_or_receive(f"recv from rank {by}", only("recv", given), begin)

    def recv_anysource(self, given: Any, tag: int = 0) -> Work:
        """Take in the next message of whoever sends first; `source_rank` of the work says who that was."""
        tensors.tagged("recv", tag)

        def begin(messages: Messages, wish: Wish) -> None:
            messages.receive_any(wish, tag)

        return self._send_or_receive("recv from any rank", only("recv", given), begin)


# Other names of the same, by which older versions of torch ask for it.
for _name, _function in {
    "_allgather_base": TorchrelayGroup.all_gather_single,
    "allgather_into_tensor_coalesced": TorchrelayGroup.all_gather_single_coalesced,
    "_reduce_scatter_base": TorchrelayGroup.reduce_scatter_single,
    "reduce_scatter_tensor_coalesced": TorchrelayGroup.reduce_scatter_single_coalesced,
    "alltoall_base": TorchrelayGroup.all_to_all_single,
}.items():
    setattr(TorchrelayGroup, _name, _function)


# ---------------------------------------------------------------- torch's way to it


class _Making:
    """How groups are made from now on."""

    alone = False


def make_alone(alone: bool) -> None:
    """Whether groups that torch makes from now on are alone until they are told to connect."""
    _Making.alone = alone


def create(given: Any, _options: object = None) -> TorchrelayGroup:
    """A group as torch asks for it."""
    store = None if _Making.alone else given.store
    group = TorchrelayGroup(store, given.group_rank, given.group_size, given.timeout, given.group_id)
    group.options.global_ranks_in_group = list(given.global_ranks_in_group)
    group.options.group_name = given.group_id
    return group


def register() -> None:
    """Tell torch of the backend."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])


register()
