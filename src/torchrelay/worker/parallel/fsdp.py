"""FSDP2 (`fully_shard`): its parameters as they belong to the state, and all put right after an interrupted step.

While a module computes, the whole parameters stand in it in place of the shards; the state is the shards. An
interrupted pass leaves it in the middle: parameters gathered, results pending, hooks counting. `put_right` makes it
what it is between two steps. All ranks do that at each resume, as who still had its root's parameters gathered would
gather once less than the others, and wait for them for ever.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.distributed import _composable_state

from torchrelay.errors import StateMismatchError
from torchrelay.worker.hardware import device

# What a parameter group holds from one part of a step to the next, and what it holds between steps. Those that this
# version of torch does not have are left out; what a later one adds is for its own `reset_iter_state`.
_PENDING = {
    "_all_gather_result": None,
    "_post_reduce_event": None,
    "_all_reduce_state": None,
    "_reshard_after_forward_event": None,
    "_partial_reduce_output": None,
}
# What scripts switch for their micro-batches. Not whether a forward pass is followed by a reshard: FSDP2 itself settles
# that in its first forward pass, for good.
_SETTINGS = ("reduce_grads", "all_reduce_grads", "reshard_after_backward")
_TOLD = (*_SETTINGS, "unshard_in_backward")
_LISTS = ("reduce_scatter_states", "_last_post_reduce_events", "post_forward_order")  # of the communication context


def is_sharded(module: torch.nn.Module) -> bool:
    """Whether `fully_shard` was applied to this module itself."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def states(module: torch.nn.Module) -> list[Any]:
    """FSDP's states of all modules in this one, in the order of the modules; several modules may share one."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    found = (inner._get_fsdp_state() for inner in module.modules() if is_sharded(inner))  # type: ignore[operator]
    return list({id(state): state for state in found}.values())


def living() -> list[weakref.ref[Any]]:
    """FSDP's states of all modules of this process, also of those that are no part of the state (a frozen teacher)."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    kind = sys.modules["torch.distributed.fsdp"].FSDPModule
    # `fully_shard` enters each module here. To look for them among all objects would take a tenth of a second.
    entered = list(_composable_state._module_state_mapping)
    found = [module._get_fsdp_state() for module in entered if isinstance(module, kind)]
    return [weakref.ref(state) for state in {id(state): state for state in found}.values()]


def groups(module: torch.nn.Module) -> list[Any]:
    """The parameter groups of all modules in this one."""
    return [group for state in states(module) for group in _groups(state)]


def named_parameters(
    module: torch.nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """As the module's own, with the shard in place of a parameter that is gathered just now. From the main thread."""
    shards = _shards(module)
    for name, parameter in module.named_parameters(remove_duplicate=remove_duplicate):
        yield name, shards.get(id(parameter), parameter)


def _groups(state: Any) -> list[Any]:
    several = getattr(state, "_fsdp_param_groups", None)  # one or none before torch 2.12
    if several is not None:
        return list(several)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _shards(module: torch.nn.Module) -> dict[int, torch.nn.Parameter]:
    """By the id of a gathered parameter, the shard that it was made of."""
    found = {}
    for group in groups(module):
        for one in group.fsdp_params:
            for name in ("_unsharded_param", "_sharded_post_forward_param"):
                stand_in = getattr(one, name, None)
                if stand_in is not None:
                    found[id(stand_in)] = one.sharded_param
    return found


# ---------------------------------------------------------------- what we refuse


def refusal(module: torch.nn.Module) -> str | None:
    """Why this module cannot be carried through a fault, with the remedy; None if it can. For protect()."""
    for group in groups(module):
        if any(map(_steps_in_backward, group.fsdp_params)):
            return "an optimizer that runs inside backward updates before the step is committed: step it after backward"
        if getattr(group, "_all_reduce_hook", None) is not None:
            return "a hook for all-reduce may keep state between steps: use a two-dimensional mesh (HSDP) instead"
        for name, expected in (
            ("_all_gather_comm", "DefaultAllGather"),
            ("_reduce_scatter_comm", "DefaultReduceScatter"),
        ):
            found = type(getattr(group, name, None)).__name__
            if found not in (expected, "NoneType"):
                return f"{found} communicates past torch's process groups: leave FSDP2's own communication in place"
        for one in group.fsdp_params:
            if hasattr(one._sharded_local_tensor, "fsdp_pre_all_gather"):
                return "a parameter brings its own all-gather (such as float8): it is not supported"
    return None


def _steps_in_backward(one: Any) -> bool:
    parameter = one.sharded_param
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None)) or hasattr(
        parameter, "_in_backward_optimizers"
    )


def accumulated(module: torch.nn.Module) -> bool:
    """Whether gradients wait to be reduced in a later backward pass (`set_requires_gradient_sync(False)`)."""
    for group in groups(module):
        if getattr(group, "_partial_reduce_output", None) is not None:
            return True
        for one in group.fsdp_params:
            whole = getattr(one, "_unsharded_param", None)
            if one.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None):
                return True
    return False


# ---------------------------------------------------------------- put right


class Settings:
    """What scripts switch inside a step, for their micro-batches. A `Mark`."""

    def __init__(self, states: list[Any]) -> None:
        self._states = states
        self._groups = [group for state in states for group in _groups(state)]
        self._before: list[tuple[Any, ...]] = []
        self._last: list[bool] = []

    def mark(self) -> None:
        self._before = [tuple(getattr(group, name) for name in _SETTINGS) for group in self._groups]
        self._last = [state._state_ctx.is_last_backward for state in self._states]

    def rewind(self) -> None:
        for group, values in zip(self._groups, self._before, strict=True):
            for name, value in zip(_SETTINGS, values, strict=True):
                setattr(group, name, value)
        for state, last in zip(self._states, self._last, strict=True):
            state._state_ctx.is_last_backward = last


def told(states: list[Any]) -> list[Any]:
    """What scripts switch at any time, for good, and must be the same on all ranks, or they gather unequally often."""
    return [
        [
            state._is_root is not None,  # whether it has settled itself, in a first forward pass
            state._auto_reshard_after_forward,
            state._state_ctx.is_last_backward,
            [[*(getattr(group, name) for name in _TOLD), _after_forward(group)] for group in _groups(state)],
        ]
        for state in states
    ]


def take(states: list[Any], given: list[Any]) -> None:
    """Switch all as on the source. Raises `StateMismatchError` if it cannot be."""
    if len(states) != len(given):
        raise StateMismatchError(f"{len(given)} modules are sharded by FSDP2 on the source, and {len(states)} here")
    for state, (settled, automatic, last, of_groups) in zip(states, given, strict=True):
        state._auto_reshard_after_forward = automatic
        state._state_ctx.is_last_backward = last
        for group, (*values, after) in zip(_groups(state), of_groups, strict=True):
            for name, value in zip(_TOLD, values, strict=True):
                setattr(group, name, value)
            if settled and after != _after_forward(group):
                if after == "other":
                    raise StateMismatchError(
                        "FSDP2 reshards to a smaller mesh after forward on the source, and not here"
                    )
                group.post_forward_mesh_info = group.mesh_info if after == "all" else None


def _after_forward(group: Any) -> str:
    """How parameters are sharded again after a forward pass."""
    if group.post_forward_mesh_info is None:
        return "not"
    return "all" if group.post_forward_mesh_info is group.mesh_info else "other"


def put_right(found: list[Any]) -> None:
    """Make these states as they are between two steps: parameters sharded, nothing pending.

    Gradients of shards are left as they are; those that were not reduced yet are dropped. It does not communicate, and
    waits for no collective: to be called when the groups are wired anew, or were never used.
    """
    if found:
        device.wait()
    for state in found:
        _put_context_right(state)
        for group in _groups(state):
            _put_group_right(group)
    for state in found:
        # In a first forward pass that was cut short it may not be there yet.
        if state._is_root and hasattr(state._comm_ctx, "reduce_scatter_states") and hasattr(state, "_reset_iter_state"):
            state._reset_iter_state()  # torch's own, since 2.13; there is nothing left for it to wait for


def _put_context_right(state: Any) -> None:
    idle = type(state._training_state).IDLE
    state._training_state = idle
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
    if hasattr(state, "_modules_to_run_forward"):
        state._modules_to_run_forward.clear()
    context = state._comm_ctx
    if hasattr(context, "all_gather_state"):
        context.all_gather_state = None
    if hasattr(context, "reduce_scatter_state"):  # before torch 2.13
        context.reduce_scatter_state = None
    for name in _LISTS:
        if hasattr(context, name):
            getattr(context, name).clear()


def _put_group_right(group: Any) -> None:
    for name, value in _PENDING.items():
        if hasattr(group, name):
            setattr(group, name, value)
    group._post_forward_indices.clear()
    group._training_state = type(group._training_state).IDLE
    for one in group.fsdp_params:
        one.unsharded_accumulated_grad = None
        if getattr(one, "_unsharded_param", None) is not None:
            one._unsharded_param.grad = None
        if getattr(one, "_sharded_post_forward_param", None) is not None:
            one._sharded_post_forward_param = one._sharded_post_forward_param_data = None
        one.grad_offload_event = None
        one.to_sharded()  # also where the group says that it is: it may have been cut short on the way from there
    group._sharded_state = type(group._sharded_state).SHARDED


# ---------------------------------------------------------------- looking on


def before_reducing(module: torch.nn.Module, look: Callable[[list[torch.Tensor]], None]) -> Callable[[], None]:
    """Have `look` called with a group's shards, before each time that gradients are added to them.

    Returns what ends it.
    """
    watched = groups(module)
    for group in watched:
        group.post_backward = _looking(group, look)

    def end() -> None:
        for group in watched:
            vars(group).pop("post_backward", None)

    return end


def _looking(group: Any, look: Callable[[list[torch.Tensor]], None]) -> Callable[..., None]:
    reduce = type(group).post_backward

    def look_and_reduce(*unused: Any) -> None:
        look([one.sharded_param for one in group.fsdp_params])
        reduce(group, *unused)

    return look_and_reduce


def managed(modules: Iterable[torch.nn.Module]) -> set[int]:
    """The ids of all shards: autograd adds nothing to their gradients, FSDP2 does."""
    return {id(one.sharded_param) for module in modules for group in groups(module) for one in group.fsdp_params}
