"""What tests of plans share."""

from __future__ import annotations

from tests.support.telling import JOB, Story
from torchrelay.orchestrator.views.plans import (
    Planned,
    TaintAsk,
    plan_taint,
)
from torchrelay.orchestrator.views.scene import Scene, Ways
from torchrelay.protocol.health.pulses import FailureDetector
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages.ids import NodeId

WHO = "ann@desk"


def two_nodes(spares: int = 2, slots: int = 3) -> Story:
    """A job that trains: ranks 0, 1 on node-0, ranks 2, 3 on node-1, and spares behind them."""
    story = Story()
    spec = ev.JobSpec(job=JOB, world_size=4, nproc_per_node=2, nodes=2, spares=spares)
    story.hear(ev.JobSubmitted(spec=spec))
    for number in (0, 1):
        story.hear(ev.NodeJoined(node=NodeId(f"node-{number}"), incarnation="a", slots=slots))
    story.settle()
    assert story.job.phase == "running"
    return story


def scene(story: Story, ways: Ways | None = None) -> Scene:
    return Scene(story.cluster, FailureDetector(), {}, (), story.now_ms, ways or {})


def taint(story: Story, **words: object) -> Planned:
    return plan_taint(scene(story), TaintAsk(**words), WHO)  # type: ignore[arg-type]
