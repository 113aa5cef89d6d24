"""Pipeline stages (torch.distributed.pipelining): what they have found out, and all put right after a fault.

In its first step, and at each change between training and evaluation, a schedule settles with its neighbours what will
travel between them, and makes buffers for it. That belongs to the state: a replacement that settled it alone would wait
for those who have long done so. `told` and `take` carry it, as plain values; the buffers are made here.

A schedule that was cut short leaves activations, losses and receipts of chunks behind, and would go on with them in its
next step. `put_right` drops them. All ranks do that at each resume.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torchrelay.errors import RefusedError, StateMismatchError

_STAGES, _SCHEDULES = "torch.distributed.pipelining.stage", "torch.distributed.pipelining.schedules"
_METAS = ("inputs", "outputs", "input_grads", "output_grads")
_SETTLED = ("_inference_mode", "_has_backward", "chunks", "grad_send_info")  # of a stage: values
_BUFFERS = ("args_recv_info", "act_send_info", "grad_recv_info")  # of a stage: dicts by chunk or output
_PASSING = ("fwd_cache", "bwd_cache", "output_chunks", "backward_state", "dw_runner")
_INFERRING = ("_fwd_outputs_for_bwd_meta", "_fwd_inputs_for_bwd_meta", "_fwd_kwargs_tensors_for_bwd_meta")
_FLAGS = ("forward_initialized", "backward_initialized")  # of a schedule, after `_stage_` or `_stages_`
_WORKING = ("_internal_losses", "fwd_recv_ops", "bwd_recv_ops", "unshard_ops", "unsharded_stages", "backward_counter")
# Without these a replacement could not make what the others have made in their first step.
_NEEDED = ("_stage_meta", "_setup_forward_recv_info", "_setup_forward_send_info", "_setup_backward_recv_info")


class Told(NamedTuple):
    """Of all stages and schedules, what they have settled. Plain values: it travels."""

    stages: list[Any]  # index, mode, whether it has a backward pass, chunks, buffers forward and backward, what travels
    schedules: list[Any]  # key, and whether it has settled its forward and backward passes


class Pipeline:
    """All stages and schedules of this process, as they are at protect(); none may be made later."""

    def __init__(self) -> None:
        stages, schedules = _living()
        self._stages = [weakref.ref(stage) for stage in sorted(stages, key=lambda stage: int(stage.stage_index))]
        self._schedules = [weakref.ref(schedule) for schedule in sorted(schedules, key=_key)]

    def stages(self) -> list[Any]:
        """The stages of this rank, in the order of their indices."""
        return [stage for found in self._stages if (stage := found()) is not None]

    def schedules(self) -> list[Any]:
        """The schedules, in an order that is the same on a replacement."""
        return [schedule for found in self._schedules if (schedule := found()) is not None]

    # ------------------------------------------------------------ what is settled

    def told(self) -> Told:
        """For `take` on another worker of this rank, or of a replica."""
        return Told(
            [_stage_told(stage) for stage in self.stages()],
            [[_key(schedule), *_flags(schedule)] for schedule in self.schedules()],
        )

    def take(self, told: Any) -> None:
        """Be as settled as the source. Raises `StateMismatchError` if other stages or schedules are here."""
        stages, schedules = told
        here = ([stage.stage_index for stage in self.stages()], [_key(schedule) for schedule in self.schedules()])
        there = ([stage[0] for stage in stages], [schedule[0] for schedule in schedules])
        if here != there:
            raise StateMismatchError(f"the source has the pipeline stages and schedules {there}, and this rank {here}")
        for stage, settled in zip(self.stages(), stages, strict=True):
            _settle(stage, settled)
        for schedule, (_, *flags) in zip(self.schedules(), schedules, strict=True):
            for name, flag in zip(_flag_names(schedule), flags, strict=True):
                setattr(schedule, name, flag)

    # ------------------------------------------------------------ put right

    def put_right(self) -> None:
        """As between two steps: nothing is on its way through. It does not communicate."""
        for stage in self.stages():
            for name in _PASSING:
                getattr(stage, name).clear()
            for name in _INFERRING:
                if hasattr(stage, name):
                    setattr(stage, name, None)
            for received in stage.args_recv_info.values():
                for info in received:
                    if info.buffer is not None:
                        info.buffer.grad = None
        for schedule in self.schedules():
            for name in _WORKING:
                if hasattr(schedule, name):
                    getattr(schedule, name).clear()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within it steps may be gone through with nobody else there, as far as all is settled.

        What would have to be settled raises `RefusedError`: torch unpickles what a neighbour sends, and there is none.
        """
        schedules = self.schedules()
        for stage in self.stages():
            for received in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
                for info in received:
                    if info.buffer is not None:
                        info.buffer.detach().zero_()  # it may be read as indices
        for schedule in schedules:
            schedule._warmup_p2p = _not_alone
        try:
            yield
        finally:
            for schedule in schedules:
                vars(schedule).pop("_warmup_p2p", None)


class Settled:
    """What a call may settle in the stages and schedules before its gate. A `Mark`."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._stages = pipeline.stages()
        self._schedules = pipeline.schedules()
        self._before: list[dict[str, Any]] = []
        self._flags: list[list[bool]] = []

    def mark(self) -> None:
        self._before = [_copied(stage) for stage in self._stages]
        self._flags = [_flags(schedule) for schedule in self._schedules]

    def rewind(self) -> None:
        for stage, before in zip(self._stages, self._before, strict=True):
            vars(stage).update({**before, **{name: before[name].copy() for name in _BUFFERS}})
            stage._stage_meta = replace(before["_stage_meta"])
        for schedule, flags in zip(self._schedules, self._flags, strict=True):
            for name, flag in zip(_flag_names(schedule), flags, strict=True):
                setattr(schedule, name, flag)


class NoneYet:
    """That nobody begins with pipelining after protect(): what stages hold would be taken for replicated. A `Mark`."""

    def __init__(self) -> None:
        self._looked = _STAGES in sys.modules  # then protect() has looked, and no more can be made

    def mark(self) -> None:
        if not self._looked and _STAGES in sys.modules:
            self._looked = True
            if any(_living()):
                raise made_later("a pipeline stage")
            forbid()

    def rewind(self) -> None:
        pass


def made_later(what: str) -> RefusedError:
    """A stage or a schedule was made when protect() had looked at all that there is."""
    return RefusedError(f"{what} is made after protect()", "make stages and schedules before it")


def _copied(stage: Any) -> dict[str, Any]:
    if stage._stage_meta.has_dtensors():
        raise RefusedError(
            f"stage {stage.stage_index} of a pipeline sends DTensors to its neighbour",
            "send plain tensors: to_local() at its end, from_local() at the next one's beginning",
        )
    found = {name: getattr(stage, name) for name in _SETTLED}
    found.update({name: getattr(stage, name).copy() for name in _BUFFERS})
    found["_stage_meta"] = replace(stage._stage_meta)
    return found


# ---------------------------------------------------------------- stages and schedules


def _living() -> tuple[list[Any], list[Any]]:
    """All stages, and all schedules, that the script still has."""
    if _STAGES not in sys.modules:
        return [], []
    found = _instances()
    if found:
        gc.collect()  # one that the script has dropped would not be there on a replacement
        found = _instances()
    stage = sys.modules[_STAGES]._PipelineStageBase
    return [one for one in found if isinstance(one, stage)], [one for one in found if not isinstance(one, stage)]


def _instances() -> list[Any]:
    kinds = {kind for base in _bases() for kind in _with_subclasses(base)}
    return [thing for thing in gc.get_referrers(*kinds) if type(thing) in kinds]


def _bases() -> list[type]:
    if _STAGES not in sys.modules:
        return []
    return [sys.modules[_STAGES]._PipelineStageBase, sys.modules[_SCHEDULES]._PipelineSchedule]


def _with_subclasses(kind: type) -> Iterator[type]:
    yield kind
    inner: type
    for inner in kind.__subclasses__():
        yield from _with_subclasses(inner)


def _of(schedule: Any) -> list[Any]:
    return [schedule._stage] if hasattr(schedule, "_stage") else list(schedule._stages)


def _key(schedule: Any) -> str:
    """By which a schedule is known on another worker of this rank."""
    indices = ",".join(str(stage.stage_index) for stage in _of(schedule))
    loss = "" if schedule._loss_fn is None else " with a loss"
    return f"{type(schedule).__name__} of {schedule._n_microbatches} chunks over {indices}{loss}"


def _flag_names(schedule: Any) -> list[str]:
    start = "_stage_" if hasattr(schedule, "_stage") else "_stages_"
    return [start + flag for flag in _FLAGS]


def _flags(schedule: Any) -> list[bool]:
    return [bool(getattr(schedule, name)) for name in _flag_names(schedule)]


def _not_alone(*_: Any, **__: Any) -> None:
    raise RefusedError("a pipeline would settle with its neighbours what travels between them", "")


# ---------------------------------------------------------------- of one stage


def _stage_told(stage: Any) -> list[Any]:
    mode = None if stage._inference_mode is None else stage._inference_mode.value
    counts = [len(stage.args_recv_info), len(stage.grad_recv_info)]
    metas = [_metas_told(getattr(stage._stage_meta, name)) for name in _METAS]
    return [stage.stage_index, mode, stage.has_backward, stage.chunks, counts, metas]


def _settle(stage: Any, settled: list[Any]) -> None:
    """Make of a stage what the source's has become. It does not communicate."""
    from torch.distributed.pipelining._utils import InferenceMode  # the script has imported it

    _, mode, has_backward, chunks, (forward, backward), metas = settled
    stage._inference_mode = None if mode is None else InferenceMode(mode)
    stage.has_backward = has_backward
    stage.grad_send_info = None
    for name, told in zip(_METAS, metas, strict=True):
        setattr(stage._stage_meta, name, _metas(told))
    for name in _BUFFERS:
        setattr(stage, name, {})
    if forward:
        stage._setup_forward_recv_info(forward, has_backward)
        stage._setup_forward_send_info()
    if backward:
        stage._setup_backward_recv_info(backward)
    stage.chunks = chunks


def _metas_told(metas: Any) -> list[Any] | None:
    if metas is None:
        return None
    return [
        None
        if meta is None
        else [list(meta.shape), list(meta.stride), str(meta.dtype).removeprefix("torch."), meta.requires_grad]
        for meta in metas
    ]


def _metas(told: list[Any] | None) -> tuple[Any, ...] | None:
    from torch.distributed.pipelining._utils import _TensorMeta

    if told is None:
        return None
    return tuple(
        None if one is None else _TensorMeta(torch.Size(one[0]), tuple(one[1]), getattr(torch, one[2]), bool(one[3]))
        for one in told
    )


# ---------------------------------------------------------------- who holds a stage


def spans_all(stage: Any) -> bool:
    """Whether its pipeline has one rank for each stage, so that this rank alone holds it.

    Else others run beside it, and which of their ranks hold the same stage is for DDP, or for the placements of
    DTensors, to say.
    """
    return bool(stage.group.size() == dist.get_world_size())


# ---------------------------------------------------------------- what we refuse


def refusal(pipeline: Pipeline, wrappers: list[Any]) -> tuple[str, str] | None:
    """Why these stages cannot be carried through a fault, and the remedy; None if they can. For protect().

    `wrappers`: the DDP wrappers in the state.
    """
    for stage in pipeline.stages():
        why = _refusal_of(stage, wrappers)
        if why is not None:
            return f"stage {stage.stage_index} of a pipeline {why[0]}", why[1]
    keys = [_key(schedule) for schedule in pipeline.schedules()]
    for key in keys:
        if keys.count(key) > 1:
            return f"two pipeline schedules look alike ({key})", "make one, and use it for both"
    return None


def _refusal_of(stage: Any, wrappers: list[Any]) -> tuple[str, str] | None:
    if not hasattr(stage, "_user_meta"):
        return "was made by pipeline() or build_stage()", "make it with PipelineStage(module, index, count, device)"
    if not all(hasattr(stage, name) for name in _NEEDED):
        return f"is one of torch {torch.__version__}, in which it cannot be settled alone", "use torch 2.13"
    if stage.group is None or stage.group is dist.group.WORLD:
        # There ranks are compared by how much they have communicated, and one in the middle sends more than one at an
        # end: it would seem that others wait for the latter.
        return "communicates in the default group", "give it one of its own: PipelineStage(..., group=dist.new_group())"
    if stage._user_meta.has_dtensors():
        return "sends DTensors to its neighbour", "send plain tensors: to_local() at its end"
    if stage.dw_builder is not None:
        return "has a dw_builder, which may keep state between chunks", "leave it out"
    wrapper = stage.submod
    if not isinstance(wrapper, torch.nn.parallel.DistributedDataParallel):
        return None
    if not any(wrapper is known for known in wrappers):
        return "runs a DDP wrapper that protect() was not given", "pass the modules as the stages have them"
    if not wrapper.find_unused_parameters and not stage._user_meta.is_complete_for_forward():
        # Its shapes are found out in a forward pass that leaves DDP waiting for gradients of no backward pass: torch
        # itself fails with an internal assertion in the second step.
        return "under DDP was not told what travels", "pass input_args= and output_args= to PipelineStage"
    return None


def forbid() -> None:
    """From now on the making of a stage or a schedule raises `RefusedError`."""
    for base in _bases():
        base.__init__ = _forbidden  # type: ignore[misc]


def _forbidden(self: Any, *_: Any, **__: Any) -> None:
    raise made_later(f"a {type(self).__name__}")
