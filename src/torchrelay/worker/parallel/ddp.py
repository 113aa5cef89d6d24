"""DDP's reducer: the same buckets on every rank at every step, and a fresh reducer after an interrupted one.

How gradients are summed depends on how they lie in buckets, so the layout of the buckets belongs to the state. torch
changes it once: after the first backward pass, at the beginning of the next forward, to the order in which rank 0's
gradients arrived. A fault between the two would lose that order. So `settle`, called at the gate, lets it happen before
the step commits, and after the commit the layout is the same everywhere, and for good.

An interrupted backward pass leaves a reducer in the middle of its work. `renew` puts a fresh one in its place; the
DDP object, the module in it and its parameters stay.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import FakeWork
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from torchrelay.errors import UnprovedError

STATELESS = (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook)
_create_work: Any = getattr(_distributed_c10d, "_create_work_from_future")  # noqa: B009  the stubs do not know it
BUILTIN = {str(hook): hook for hook in _distributed_c10d.BuiltinCommHookType.__members__.values()}


class Layout(TypedDict):
    """What of a DDP wrapper belongs to the state. Plain values: it travels."""

    buckets: list[list[int]]  # which parameters are in each bucket, in the order of reduction
    settled: bool  # it will not change any more
    sync_buffers: bool  # whether the next forward pass broadcasts the buffers


@dataclass(frozen=True)
class _Built:
    """What the reducer was made of when we first saw the wrapper; parameters may be frozen later, numbers stay."""

    parameters: list[torch.nn.Parameter]
    sparse: list[bool]
    names: dict[int, str]


_SYNC = "_torchrelay_sync"  # where a wrapper carries what `mark` remembers
_built: weakref.WeakKeyDictionary[DistributedDataParallel, _Built] = weakref.WeakKeyDictionary()
_buckets: weakref.WeakKeyDictionary[DistributedDataParallel, tuple[bool, list[list[int]]]] = weakref.WeakKeyDictionary()


def install() -> None:
    """From now on, see what each reducer is made of: scripts may freeze parameters between that and protect()."""
    inside: Any = DistributedDataParallel
    make = inside._ddp_init_helper

    @functools.wraps(make)
    def seen(ddp: Any, parameters: Any, sparse: Any, names: Any, *more: Any, **named: Any) -> None:
        _built[ddp] = _Built(list(parameters), list(sparse), dict(names))
        make(ddp, parameters, sparse, names, *more, **named)

    inside._ddp_init_helper = seen


def left_out(ddp: DistributedDataParallel) -> list[str]:
    """Parameters that get gradients by now and were frozen when DDP was made: nobody averages those gradients."""
    known = set(map(id, _remember(ddp).parameters))
    ignored = ddp.parameters_to_ignore
    named = ddp.module.named_parameters()
    return [name for name, one in named if one.requires_grad and id(one) not in known and name not in ignored]


def find(model: torch.nn.Module) -> list[DistributedDataParallel]:
    """The DDP wrappers in a model, itself included, in the order of its modules."""
    found = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    for ddp in found:
        _remember(ddp)
    return found


def has_group(ddp: DistributedDataParallel) -> bool:
    """Whether its process group still is one. Wrappers of a group that was destroyed lie about until collected."""
    return ddp.process_group in c10d._world.pg_map


# ---------------------------------------------------------------- what we refuse


def refusal(ddp: DistributedDataParallel) -> str | None:
    """Why this wrapper cannot be carried through a fault, with the remedy; None if it can. For protect()."""
    if ddp._use_python_reducer:
        return "DDP uses its Python reducer: leave torch._dynamo.config.optimize_ddp at its default"
    if ddp.mixed_precision is not None:
        return "DDP's own mixed_precision keeps copies of parameters: use torch.autocast instead"
    if ddp._delay_all_reduce_params:
        return "delay_all_reduce_named_params reduces outside DDP's buckets: leave it out"
    if hasattr(ddp, "buffer_hook"):
        return "a hook for buffers may keep state that cannot be restored: leave it out, and reduce buffers in the step"
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in ddp.module.parameters()):
        return "an optimizer that runs inside backward updates before the step is committed: step it after backward"
    if any(hasattr(parameter, "_st_info") for parameter in ddp.module.parameters()):
        return (
            "DDP over tensor-parallel modules puts other parameters in their place in every forward pass: use "
            "fully_shard over a mesh with a replicated dimension"
        )
    if ddp._join_config.enable:
        return "uneven inputs (DDP.join) let ranks take part in steps that are not theirs: give all ranks equally many"
    return _refusal_of_hooks(ddp)


def _refusal_of_hooks(ddp: DistributedDataParallel) -> str | None:
    for hook, state in ddp._comm_hooks:
        name = getattr(hook, "__qualname__", repr(hook))
        if getattr(hook, "torchrelay_stateless", False):
            continue  # the script vouches for it
        if hook not in STATELESS:
            return (
                f"the communication hook {name} may keep state between steps (error feedback, a warm start): "
                "use one of torch's default_hooks, or set torchrelay_stateless = True on it if it keeps none"
            )
        if state is not None and not isinstance(state, dist.ProcessGroup):
            return f"the communication hook {name} was given a state: give it None or a process group"
    name = _hook_name(ddp)
    if not ddp._comm_hooks and name and name not in BUILTIN:
        return f"the communication hook {name} was registered below DDP: use register_comm_hook"
    return None


def _hook_name(ddp: DistributedDataParallel) -> str:
    """The name of the communication hook, as DDP's logger keeps it; empty if there is none."""
    inside: Any = ddp
    return str(inside._get_ddp_logging_data().get("comm_hook", "")) if ddp.logger is not None else ""


# ---------------------------------------------------------------- the layout


def mark(ddp: DistributedDataParallel) -> None:
    """Remember, at the entry of a call, what an interrupted call may have changed. To be called before it may stop.

    Whether the next forward broadcasts the buffers depends on the forward before (one under `no_sync` or without
    gradients switches it off). It must be the same on all ranks, or they wait for one another for ever.
    """
    vars(ddp)[_SYNC] = ddp.require_forward_param_sync  # around Module.__setattr__, which costs microseconds


def settle(ddp: DistributedDataParallel) -> bool:
    """Let DDP change its buckets now, if it still will. At the gate, on all ranks: it communicates the first time.

    Returns whether the layout is final; then it needs not be called again.
    """
    if ddp._has_rebuilt_buckets:
        return _is_known(ddp)
    if ddp.find_unused_parameters and not ddp.static_graph:
        return True
    reducer = ddp.reducer
    if not _is_whole(ddp):
        return False  # gradients are missing: DDP will say so itself, in its next forward pass
    if ddp.static_graph:
        # torch would change the buckets after the second step, from what it counted in the first: both would be lost
        # by a fault between them. The order in which parameters were defined, reversed, is as good.
        buckets = _reversed_order(ddp)
        _dictate(ddp, buckets)
        _buckets[ddp] = (True, buckets)
    elif not reducer._rebuild_buckets():
        return False  # no backward pass with communication yet
    ddp._has_rebuilt_buckets = True
    return _is_known(ddp)


def _is_known(ddp: DistributedDataParallel) -> bool:
    """Read the layout on the CPU, for targets to come: it takes as much memory as all gradients.

    After DDP has changed them, buckets of sparse gradients can be read only when the next backward pass is over.
    """
    built = _remember(ddp)
    if known_layout(ddp) is None and all(parameter.device.type == "cpu" for parameter in built.parameters):
        try:
            layout(ddp)
        except UnprovedError:
            return False
    return True


def has_trained(ddp: DistributedDataParallel) -> bool:
    """Whether it has been through more than one backward pass: torch counts an iteration when the next one begins."""
    told: dict[str, int] = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]  # torch's own has no types
    return told.get("iteration", 0) > 0


def is_final(ddp: DistributedDataParallel) -> bool:
    """Whether this wrapper's reducer goes on beside fresh ones of the same layout without a difference.

    Not if it is yet to change its buckets by what it has counted; with a static graph, a first step goes another way.
    """
    if ddp.static_graph:
        return False
    return bool(ddp._has_rebuilt_buckets or ddp.find_unused_parameters)


def adopt(ddp: DistributedDataParallel, layout: Layout) -> bool:
    """Go on with the reducer that is there, if it has this layout and is in the middle of nothing; else False.

    Its buckets are in memory that was touched, those of a fresh one are not. That no pass is half done can be asked;
    that it has counted nothing in a pass without communication, or in a forward pass alone, is for the caller to know.
    """
    known = known_layout(ddp)
    if known is None or not (known["settled"] == layout["settled"] and known["buckets"] == layout["buckets"]):
        return False
    ddp.reducer._update_process_group(ddp.process_group)  # whatever it was rehearsed with
    if not _is_whole(ddp):
        return False
    ddp.require_forward_param_sync = vars(ddp)[_SYNC] = layout["sync_buffers"]
    return True


def _is_whole(ddp: DistributedDataParallel) -> bool:
    """Whether no backward pass is half done."""
    try:
        ddp.reducer._check_reducer_finalized()
    except RuntimeError:
        return False
    return True


def layout(ddp: DistributedDataParallel) -> Layout:
    """The layout that the next step will use, if the last one went by the gate. At any time."""
    known = known_layout(ddp)
    if known is None:
        _buckets[ddp] = (ddp._has_rebuilt_buckets, _read_buckets(ddp))
        known = known_layout(ddp)
        assert known is not None, "it was just read"
    return known


def known_layout(ddp: DistributedDataParallel) -> Layout | None:
    """The same, if it was read before: without a touch of the reducer, while another thread trains."""
    settled = ddp._has_rebuilt_buckets
    known = _buckets.get(ddp)
    if known is None or known[0] != settled:
        return None
    return Layout(
        buckets=[list(bucket) for bucket in known[1]],
        settled=settled,
        sync_buffers=vars(ddp).get(_SYNC, ddp.require_forward_param_sync),
    )


def _read_buckets(ddp: DistributedDataParallel) -> list[list[int]]:
    """The buckets of the live reducer. It hands them out with zeros as large as all gradients, so it is asked once."""
    numbers = {id(parameter): number for number, parameter in enumerate(_remember(ddp).parameters)}
    try:
        buckets = ddp.reducer._get_zeros_like_grad_buckets()
    except RuntimeError as error:
        if not any(_remember(ddp).sparse):
            raise
        raise UnprovedError(
            "a rank was lost before the second step with sparse gradients: in which order DDP sends them is not known "
            "yet. Start the job again: nothing but its first steps is lost"
        ) from error
    return [[numbers[id(parameter)] for parameter in bucket.parameters()] for bucket in buckets]


def _reversed_order(ddp: DistributedDataParallel) -> list[list[int]]:
    """Buckets of DDP's sizes, the last parameters first: their gradients are the first to arrive."""
    built = _remember(ddp)
    first = [_distributed_c10d._DEFAULT_FIRST_BUCKET_BYTES] if ddp.bucket_bytes_cap_default else []
    limits = [*first, ddp.bucket_bytes_cap]
    order = range(len(built.parameters) - 1, -1, -1)
    buckets, _ = _distributed_c10d._compute_bucket_assignment_by_size(
        [built.parameters[number] for number in order], limits, [built.sparse[number] for number in order], list(order)
    )
    return [list(bucket) for bucket in buckets]


# ---------------------------------------------------------------- a fresh reducer


def renew(ddp: DistributedDataParallel, layout: Layout) -> None:
    """Put a fresh reducer with this layout in the place of the old one, and drop all gradients.

    All ranks call it after each recovery, with the same layout, when their groups are wired; it does not communicate.
    Gradients become None. Raises `ValueError` if the layout is not one of this wrapper's.
    """
    built = _remember(ddp)
    expected = list(range(len(built.parameters)))
    if sorted(number for bucket in layout["buckets"] for number in bucket) != expected:
        raise ValueError(f"the layout is of other parameters than the {len(expected)} of this DDP wrapper")
    builtin = BUILTIN.get(_hook_name(ddp)) if not ddp._comm_hooks else None
    for parameter in built.parameters:
        parameter.grad = None  # views into the old buckets would keep them
    _drop_reducer(ddp)
    _make_reducer(ddp, built)
    _prepare_reducer(ddp, builtin)
    if layout["settled"]:
        _dictate(ddp, layout["buckets"])
    ddp._has_rebuilt_buckets = layout["settled"]
    ddp.require_forward_param_sync = layout["sync_buffers"]
    vars(ddp)[_SYNC] = layout["sync_buffers"]
    _buckets[ddp] = (layout["settled"], [list(bucket) for bucket in layout["buckets"]])


def _drop_reducer(ddp: Any) -> None:
    """Let go of the old reducer before there is a new one: its buckets are as large as all gradients."""
    if ddp.reducer is not None:
        ddp.reducer._remove_autograd_hooks()  # whoever else holds it: it must not reduce a second time
    ddp.logger = None
    ddp.reducer = None


def _make_reducer(ddp: Any, built: _Built) -> None:
    """A reducer as DDP makes its first one. It takes only parameters that need gradients: frozen ones, for a moment."""
    frozen = [parameter for parameter in built.parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        ddp._ddp_init_helper(built.parameters, built.sparse, built.names, ddp.static_graph)
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _prepare_reducer(ddp: Any, builtin: _distributed_c10d.BuiltinCommHookType | None) -> None:
    """Tell a fresh reducer what DDP, or the script, has told the first one."""
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
        ddp._static_graph_delay_allreduce_enqueued = False
    for hook, state in ddp._comm_hooks:
        ddp.logger._set_comm_hook_name(hook.__qualname__)
        _distributed_c10d._register_comm_hook(ddp.reducer, state, hook)
    if builtin is not None:
        ddp._register_builtin_comm_hook(builtin)


def _dictate(ddp: DistributedDataParallel, buckets: Sequence[Sequence[int]]) -> None:
    """Make the reducer change its buckets to these, once and for all.

    A reducer changes its buckets to what rank 0 broadcasts. For that moment it gets a group that broadcasts ours.
    """
    reducer = ddp.reducer
    dictation = _Dictation(ddp.process_group, buckets)
    reducer._push_all_rebuilt_params()
    reducer._update_process_group(dictation)
    try:
        changed = reducer._rebuild_buckets()
    finally:
        reducer._update_process_group(ddp.process_group)
    assert changed, "a reducer that was just told of all its parameters did not change its buckets"
    assert dictation.done, "a reducer changed its buckets without asking rank 0"


def pretend(ddp: DistributedDataParallel) -> object:
    """Let the reducer reduce with nobody there, until `unpretend`, or until it is renewed.

    What is returned must be kept as long.

    The fake backend cannot stand in: the reducer asks its works for a future, and they have none.
    """
    alone = _Alone(ddp.process_group)
    ddp.reducer._update_process_group(alone)
    return alone


def unpretend(ddp: DistributedDataParallel) -> bool:
    """Let it reduce with all ranks again. False if it was left half-way: it is to be renewed."""
    ddp.reducer._update_process_group(ddp.process_group)
    return _is_whole(ddp)


class _Alone(dist.ProcessGroup):
    """A group in which nobody answers, and nobody needs to: gradients stay what they are."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]  # needs no store

    def allreduce(self, tensors: list[torch.Tensor], _opts: Any = None) -> dist.Work:  # type: ignore[override]
        return _done(tensors)

    def broadcast(self, tensors: list[torch.Tensor], _opts: Any = None) -> dist.Work:  # type: ignore[override]
        return _done(tensors)


def _done(tensors: list[torch.Tensor]) -> dist.Work:
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result(tensors)
    work: dist.Work = _create_work(future)
    return work


class _Dictation(dist.ProcessGroup):
    """A group in which rank 0 says what it is told: all parameters and how many buckets, then the buckets' sizes."""

    def __init__(self, group: dist.ProcessGroup, buckets: Sequence[Sequence[int]]) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]  # needs no store
        order = [number for bucket in buckets for number in bucket]
        self._messages = [[*order, len(buckets)], [len(bucket) for bucket in buckets]]

    @property
    def done(self) -> bool:
        return not self._messages

    def broadcast(self, tensors: list[torch.Tensor], _opts: Any) -> FakeWork:  # type: ignore[override]
        tensors[0].copy_(torch.tensor(self._messages.pop(0), dtype=tensors[0].dtype))
        return FakeWork()


def _remember(ddp: DistributedDataParallel) -> _Built:
    built = _built.get(ddp)
    if built is None:
        inside: Any = ddp
        parameters, sparse = inside._build_params_for_reducer()
        built = _Built(parameters, sparse, inside._build_debug_param_to_name_mapping(parameters))
        _built[ddp] = built
    return built
