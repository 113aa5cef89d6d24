"""Watch: in a large job nodes beat less often, all are told so, and nobody is judged more often than they beat."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from torchrelay.orchestrator.core.watch import Watch
from torchrelay.protocol.health.pulses import (
    BEAT_MS,
    FEW_STRANGERS,
    NODES_AT_FULL_PACE,
    Beat,
    FailureDetector,
    Sample,
    forget_strangers,
    hear,
    pace_ms,
)
from torchrelay.protocol.health.silence import LEAST_SILENCE_MS, SILENT_GAPS
from torchrelay.protocol.messages.events import Event, NodeJoined, NodeLost
from torchrelay.protocol.messages.ids import Generation, NodeId, WorkerId, WorkerPhase
from torchrelay.protocol.rules.cluster import EMPTY, Cluster, advance
from torchrelay.protocol.succession.succession import VoterId
from torchrelay.wire.messages.channel import Pace, ToAgent


class Port:
    """An agent that remembers what it was told."""

    node, incarnation, voter = NodeId("node-0"), "a", VoterId("")

    def __init__(self) -> None:
        self.told: list[ToAgent] = []

    def send(self, message: ToAgent) -> None:
        self.told.append(message)

    def close(self, reason: str) -> None:
        raise AssertionError(reason)


def joined(nodes: int) -> Cluster:
    cluster = EMPTY
    for number in range(nodes):
        event = NodeJoined(node=NodeId(f"node-{number}"), incarnation="a", slots=8)
        cluster = advance(cluster, event, 1, more=number < nodes - 1)
    return cluster


def test_the_orchestrator_hears_as_many_beats_in_a_second_however_many_nodes_there_are() -> None:
    assert [pace_ms(nodes) for nodes in (0, 1, NODES_AT_FULL_PACE)] == [BEAT_MS] * 3
    assert pace_ms(NODES_AT_FULL_PACE + 1) == 2 * BEAT_MS
    for nodes in range(1, 5_000, 7):
        assert nodes / pace_ms(nodes) <= NODES_AT_FULL_PACE / BEAT_MS


def test_all_agents_are_told_once_when_the_pace_changes() -> None:
    one, port = Watch(), Port()
    few, many = joined(3), joined(NODES_AT_FULL_PACE + 1)
    detector = one.set_pace(FailureDetector(), few, [port])
    assert (detector.beat_ms, port.told) == (BEAT_MS, [])
    detector = one.set_pace(one.set_pace(detector, many, [port]), many, [port])
    assert (detector.beat_ms, port.told) == (2 * BEAT_MS, [Pace(2 * BEAT_MS)])
    detector = one.set_pace(detector, few, [port])
    assert (detector.beat_ms, port.told[1:]) == (BEAT_MS, [Pace(BEAT_MS)])


def test_a_node_that_beats_at_a_slow_pace_is_not_lost_for_it() -> None:
    cluster = joined(2)
    for beat_ms in (BEAT_MS, 9 * BEAT_MS):
        detector = replace(FailureDetector(), beat_ms=beat_ms)
        for node in cluster.nodes:
            detector = hear(detector, Beat(node=node, incarnation="a"), 0)
        limit = max(LEAST_SILENCE_MS, SILENT_GAPS * beat_ms)
        lost: tuple[Event, ...] = ()
        for now in range(beat_ms, 2 * limit, beat_ms):
            detector = hear(detector, Beat(node=NodeId("node-0"), incarnation="a"), now)
            _, lost = Watch().judge(detector, cluster, now)
            assert bool(lost) is (now >= limit), (beat_ms, now)
        assert [event.node for event in lost if isinstance(event, NodeLost)] == ["node-1"]


def test_in_a_large_job_nobody_is_judged_more_often_than_nodes_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    cluster = joined(2)

    def look(_: FailureDetector, __: Cluster, now_ms: int) -> tuple[Event, ...]:
        looks.append(now_ms)
        return ()

    monkeypatch.setattr("torchrelay.orchestrator.core.watch.judge", look)
    for beat_ms, expected in ((BEAT_MS, 11), (4 * BEAT_MS, 1)):
        looks.clear()
        one, detector = Watch(), replace(FailureDetector(), beat_ms=beat_ms)
        for now in range(0, 1_100, 100):
            one.judge(detector, cluster, now)
        assert len(looks) == expected
        one.judge(detector, cluster, beat_ms + 1)
        assert looks[-1] == beat_ms + 1


def test_what_is_told_of_strangers_does_not_pile_up() -> None:
    def sample(number: int) -> Sample:
        return Sample(
            worker=WorkerId(f"stranger-{number}"),
            rank=None,
            generation=Generation(0),
            point=None,
            phase=WorkerPhase.BOOTING,
            phase_ms=1,
            step_ms=0.0,
            collectives=0,
            beat_ms=1,
            process="S",
            cpu_ms=1,
        )

    cluster, detector = joined(1), FailureDetector()
    for number in range(FEW_STRANGERS + 1):
        beat = Beat(node=NodeId("node-0"), incarnation="a", samples=(sample(number),))
        detector = hear(detector, beat, number)
        kept = forget_strangers(detector, cluster)
        assert len(kept.pulses) == (number + 1 if number < FEW_STRANGERS else 0)
