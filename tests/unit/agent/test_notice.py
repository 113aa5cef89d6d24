"""What a SIGTERM means to an agent: the end, or that its node is about to be taken away."""

from __future__ import annotations

from torchrelay.agent.notice import Notice
from torchrelay.protocol.messages.events import Effect, TaintSet
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.placement.taints import TOLD
from torchrelay.schedulers.lasting import AGAIN_S


class Heard:
    """An agent's notice, and what it has led to."""

    def __init__(self, *, lasts: bool) -> None:
        self.now_s = 100.0
        self.taints: list[TaintSet] = []
        self.stops: list[str] = []
        self.notice = Notice(
            NodeId("n1"), lasts=lasts, tell=self.taints.append, stop=self.stops.append, now_s=lambda: self.now_s
        )

    def after(self, seconds: float) -> None:
        self.now_s += seconds
        self.notice.hear()


def test_where_nothing_can_park_it_ends_the_agent() -> None:
    heard = Heard(lasts=False)
    heard.after(0)
    assert (heard.taints, heard.stops) == ([], ["received SIGTERM"])


def test_the_orchestrator_is_told_once_however_often_it_comes_in_a_row() -> None:
    heard = Heard(lasts=True)
    for _ in range(3):
        heard.after(0.001)
    assert heard.stops == []
    (taint,) = heard.taints
    assert (taint.node, taint.slot, taint.key, taint.value) == ("n1", None, TOLD, "15")
    assert (taint.effect, taint.gone_in_ms) == (Effect.NO_EXECUTE, None)


def test_one_that_comes_later_says_that_the_time_is_over() -> None:
    heard = Heard(lasts=True)
    heard.after(0)
    heard.after(AGAIN_S - 0.01)
    assert heard.stops == []
    heard.after(0.01)
    assert len(heard.taints) == 1
    assert heard.stops == ["received SIGTERM again: the time is over"]
