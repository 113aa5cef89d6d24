"""Pipeline stages: what they settle travels, what a fault leaves in them is dropped: one process on a fake group."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the fake backend
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.pipelining import schedules as torchs
from torch.distributed.pipelining import stage as torchs_stage
from torch.distributed.pipelining._utils import InferenceMode
from torch.nn.parallel import DistributedDataParallel

from tests.support.carrying import carry
from torchrelay.errors import RefusedError, StateMismatchError
from torchrelay.worker.parallel import ddp, pipeline
from torchrelay.worker.retry.redo import Redo
from torchrelay.worker.state import layout
from torchrelay.worker.state.layout import shard_name
from torchrelay.worker.state.state import State

pytestmark = pytest.mark.usefixtures("left_as_found")

WORLD, CHUNKS, ROWS = 4, 2, 3


@pytest.fixture(scope="module", autouse=True)
def _few_objects() -> Iterator[None]:
    """What was there before is not looked through again and again."""
    gc.freeze()
    yield
    gc.unfreeze()


class Script:
    """Two stages of two layers; this rank has one, or both of every second one, and trains as if the others did."""

    def __init__(self, *, ddp: bool = True, stages: int = 2, pipelines: int = 2, told: bool = True) -> None:
        mesh = init_device_mesh("cpu", (pipelines, WORLD // pipelines), mesh_dim_names=("replicate", "stage"))
        place, group = mesh["stage"].get_local_rank(), mesh["stage"].get_group()
        torch.manual_seed(1)
        parts: list[Any] = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(place, stages, WORLD // pipelines)]
        if ddp:
            parts = [DistributedDataParallel(part, process_group=mesh["replicate"].get_group()) for part in parts]
        self.parts, self.model = parts, nn.ModuleList(parts)
        shape: dict[str, Any] = {
            "input_args": torch.zeros(ROWS, 4),
            "output_args": torch.zeros(ROWS, 4, requires_grad=True),
        }
        self.stages = [
            PipelineStage(
                part, place + at * group.size(), stages, torch.device("cpu"), group=group, **(shape if told else {})
            )
            for at, part in enumerate(parts)
        ]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = self.make_schedule()
        self.settled = 0  # how often they had to agree
        self.schedule._warmup_p2p = self.agree
        self.state = State(self.model, self.optimizer)

    def make_schedule(self) -> Any:
        if len(self.stages) > 1:
            return ScheduleInterleaved1F1B([*self.stages], CHUNKS, nn.functional.mse_loss)
        return ScheduleGPipe(self.stages[0], CHUNKS, nn.functional.mse_loss)

    def agree(self, *_: Any) -> None:
        """In place of the neighbours' votes, which the fake group cannot give: all know what travels."""
        for stage in self.stages:
            stage._inference_mode = InferenceMode.STATIC
        self.settled += 1

    def step(self) -> None:
        first, last = self.stages[0].is_first, self.stages[-1].is_last
        rows = torch.ones(ROWS * CHUNKS, 4)
        kept = [ddp.pretend(part) for part in self.model if isinstance(part, DistributedDataParallel)]
        self.schedule.step(*([rows] if first else []), target=rows if last else None)
        del kept


# ---------------------------------------------------------------- what is settled


@pytest.mark.parametrize(("rank", "stages"), [(0, 2), (1, 2), (1, 4)])
def test_what_a_stage_has_settled_travels(become: Callable[[int], None], rank: int, stages: int) -> None:
    become(rank)
    source = Script(stages=stages)
    source.step()
    data, _ = source.state.manifest()
    assert b"DYNAMIC" not in data
    told = source.state.pipeline.told()
    kept = source.stages[-1].args_recv_info, source.stages[0].grad_recv_info, source.stages[0].act_send_info
    sizes = [[len(infos) for infos in info.values()] for info in kept]
    del source, kept
    gc.collect()
    replacement = Script(stages=stages)
    assert replacement.state.pipeline.told() != told
    replacement.state.pipeline.take([*told])
    assert replacement.state.pipeline.told() == told
    taken = (
        replacement.stages[-1].args_recv_info,
        replacement.stages[0].grad_recv_info,
        replacement.stages[0].act_send_info,
    )
    assert [[len(infos) for infos in info.values()] for info in taken] == sizes
    replacement.step()
    assert replacement.settled == 0, "what the source has settled is settled"


def test_it_travels_with_the_state(become: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    become(1)
    script = Script()
    script.step()
    other = State(script.model, script.optimizer)
    taken: list[Any] = []
    monkeypatch.setattr(other.pipeline, "take", taken.append)
    carry(script.state, other)
    assert taken == [[*script.state.pipeline.told()]]


def test_other_stages_do_not_land(become: Callable[[int], None]) -> None:
    become(0)
    script = Script()
    stages, _ = script.state.pipeline.told()
    with pytest.raises(StateMismatchError, match="the source has the pipeline stages and schedules"):
        script.state.pipeline.take([stages, [["ScheduleGPipe of 7 chunks over 0", False, False]]])


# ---------------------------------------------------------------- put right


class Cut(BaseException):
    """As a fault unwinds a step."""


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What neighbours would send arrives: the same each time. (Alone a stage computes with what its memory held.)"""

    def arrive(ops: list[dist.P2POp], **_: Any) -> list[dist.Work]:
        for op in ops:
            if op.op is dist.irecv:
                op.tensor.data.fill_(0.5)
        return []

    monkeypatch.setattr(torchs, "_batch_p2p", arrive)


@pytest.mark.usefixtures("fed")
@pytest.mark.parametrize("stages", [2, 4])
def test_a_schedule_that_was_cut_short_goes_on_as_a_fresh_one(become: Callable[[int], None], stages: int) -> None:
    become(1)  # the last stage: losses are kept here
    script = Script(stages=stages, ddp=False)
    script.step()
    script.optimizer.zero_grad()
    script.step()
    wanted = [parameter.grad.clone() for parameter in script.model.parameters() if parameter.grad is not None]
    script.optimizer.zero_grad()

    def cut(*_: Any) -> None:
        raise Cut

    hook = script.model[-1].register_full_backward_pre_hook(cut)
    with pytest.raises(Cut):
        script.step()
    hook.remove()
    assert script.schedule._internal_losses
    assert script.stages[-1].fwd_cache or script.stages[-1].output_chunks
    script.state.pipeline.put_right()
    script.optimizer.zero_grad()
    assert not script.schedule._internal_losses
    assert not script.stages[-1].fwd_cache
    script.step()
    grads = [parameter.grad for parameter in script.model.parameters() if parameter.grad is not None]
    assert all(torch.equal(one, other) for one, other in zip(grads, wanted, strict=True))


def test_what_a_call_has_settled_is_undone_when_it_is_done_again(become: Callable[[int], None]) -> None:
    become(0)
    script = Script(ddp=False)
    script.step()
    redo = Redo(script.state)
    redo.mark()
    before = script.state.pipeline.told()
    script.schedule.eval(torch.ones(ROWS * CHUNKS, 4))
    assert script.state.pipeline.told() != before
    redo.rewind()
    assert script.state.pipeline.told() == before
    assert len(script.stages[0].grad_recv_info) == CHUNKS


def test_alone_nothing_is_settled(become: Callable[[int], None]) -> None:
    become(1)
    script = Script()
    with script.state.pipeline.alone(), pytest.raises(RefusedError, match="would settle with its neighbours"):
        script.step()
    script.schedule._warmup_p2p = script.agree
    script.step()
    buffer: Any = script.stages[0].args_recv_info[0][0].buffer
    buffer.detach().fill_(7)
    with script.state.pipeline.alone():
        assert not buffer.any()
        script.step()
    assert "_warmup_p2p" not in vars(script.schedule)


# ---------------------------------------------------------------- who holds the same


def test_replicas_are_the_ranks_of_the_stages_ddp(become: Callable[[int], None]) -> None:
    found = []
    for rank in range(WORLD):
        become(rank)
        found.append(shard_name(Script().state, rank, WORLD))
        gc.collect()
    assert found == ["ranks 0,2", "ranks 1,3", "ranks 0,2", "ranks 1,3"]


def test_a_pipeline_over_all_ranks_has_no_replicas(become: Callable[[int], None]) -> None:
    become(2)
    script = Script(ddp=False, pipelines=1, stages=4)
    assert layout.blind(script.state, None) is None
    assert shard_name(script.state, 2, WORLD) == "ranks 2"


def test_replicas_that_cannot_be_seen_must_be_named(become: Callable[[int], None]) -> None:
    become(2)
    script = Script(ddp=False)
    refused = layout.blind(script.state, None)
    assert refused is not None
    assert "which other ranks hold 0.weight of stage 0" in refused[0]
    assert layout.blind(script.state, "stage 0") is None


# ---------------------------------------------------------------- what is refused


def test_shapes_that_ddp_would_have_to_find_out_are_refused(become: Callable[[int], None]) -> None:
    become(0)
    script = Script(told=False)
    refused = layout.refusal(script.state)
    assert refused is not None
    assert refused[0] == "stage 0 of a pipeline under DDP was not told what travels"


def test_shapes_that_nobody_else_finds_out_need_not_be_told(become: Callable[[int], None]) -> None:
    become(0)
    script = Script(ddp=False, told=False)
    assert layout.refusal(script.state) is None


def test_the_default_group_is_refused(become: Callable[[int], None]) -> None:
    become(0)
    stage = PipelineStage(nn.Linear(4, 4), 0, 4, torch.device("cpu"))
    refused = layout.refusal(State(stage.submod))
    assert refused is not None
    assert refused[0] == "stage 0 of a pipeline communicates in the default group"


def test_a_stage_whose_wrapper_is_not_in_the_state_is_refused(become: Callable[[int], None]) -> None:
    become(0)
    script = Script()
    refused = layout.refusal(State(script.parts[0].module))
    assert refused is not None
    assert "runs a DDP wrapper that protect() was not given" in refused[0]


def test_schedules_that_look_alike_are_refused(become: Callable[[int], None]) -> None:
    become(0)
    script = Script()
    assert layout.refusal(script.state) is None
    other = script.make_schedule()
    refused = layout.refusal(State(script.model))
    assert refused is not None
    assert "two pipeline schedules look alike (ScheduleGPipe of 2 chunks over 0 with a loss)" in refused[0]
    assert other is not script.schedule


def test_nothing_is_made_after_join(become: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    become(0)
    for kind in (torchs_stage._PipelineStageBase, torchs._PipelineSchedule):
        monkeypatch.setattr(kind, "__init__", kind.__init__)  # put back afterwards
    plain = nn.Linear(4, 4)
    with monkeypatch.context() as before:
        before.delitem(sys.modules, torchs_stage.__name__)
        redo = Redo(State(plain))
        redo.mark()
    script = Script()
    with pytest.raises(RefusedError, match="a pipeline stage is made after protect"):
        redo.mark()
    pipeline.forbid()
    with pytest.raises(RefusedError, match="a ScheduleGPipe is made after protect"):
        ScheduleGPipe(script.stages[0], CHUNKS)
    with pytest.raises(RefusedError, match="a PipelineStage is made after protect"):
        PipelineStage(plain, 0, 2, torch.device("cpu"), group=script.stages[0].group)
