"""Paths at fault, whatever happens: what is found follows from what was lost, and from nothing else."""

from __future__ import annotations

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.network_world import A, B, World, one_peer, two_peers
from torchrelay.agent.network.findings import Finding, Judge, Kind, Memory

REASONS = st.sampled_from(["silent", "told", "closed", "reset", "carrier", "error"])
# Losses of one path: how long after the one before, for how long, of which peer, and why.
LOSSES = st.lists(
    st.tuples(st.integers(2, 100), st.integers(1, 70), st.sampled_from([A, B]), REASONS), min_size=1, max_size=14
)


@given(LOSSES)
@settings(max_examples=50, deadline=None)
def test_what_is_found_follows_from_what_happened(losses: list[tuple[int, int, str, str]]) -> None:
    """Times are in half seconds. Flaps are those that were made, and nothing is found without enough of them."""
    world = two_peers(window_s=200, down_s=30, heal_s=30)
    made: dict[str, list[float]] = {A: [], B: []}
    for pause, length, remote, reason in losses:
        world.wait(pause / 2)
        world.lose(remote=remote, reason=reason)
        made[remote].append(world.now)
        longest = 0.0
        for _ in range(length):
            world.wait(0.5)
            longest += 0.5
            recent = {peer: [at for at in times if world.now - at < 200] for peer, times in made.items()}
            assert {peer: len(world.link(0, peer).flaps) for peer in made} == {
                peer: len(times) for peer, times in recent.items()
            }
            finding = world.finding()
            enough = max(len(times) for times in recent.values()) >= 8
            if finding is not None and finding.kind is Kind.DOWN and finding.whole is None and not finding.ours:
                assert longest >= 30
            if finding is not None and finding.kind is Kind.FLAPPING and finding.whole is None:
                assert enough
            if longest >= 30 or enough:
                assert finding is not None
        world.heal(remote=remote)
    world.wait(300)
    assert world.judge.findings == {}, "everything is whole, and the last loss is long ago"


@given(st.integers(1, 59), st.sampled_from([A, B]), REASONS, st.booleans(), st.booleans())
@settings(max_examples=25, deadline=None)
def test_one_short_outage_never_taints(length: int, remote: str, reason: str, both: bool, told: bool) -> None:
    world = two_peers()
    world.wait(10)
    for peer in {A, B} if both else {remote}:
        world.lose(remote=peer, reason=reason, told=told)
    world.wait(length / 2)
    assert world.judge.findings == {}
    for peer in {A, B} if both else {remote}:
        world.heal(remote=peer, told=told)
    world.wait(120)
    assert world.judge.findings == {}


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=7))
@settings(max_examples=25, deadline=None)
def test_a_peer_that_dies_and_comes_back_again_and_again_is_no_fault_of_a_path(deaths: list[tuple[int, int]]) -> None:
    """Nor is a rank that is replaced on the same node."""
    world = one_peer()
    for away, there in deaths * 3:
        for path in (0, 1):
            world.lose(path=path, reason="closed")
        world.report("peer_unreachable", remotes=(A, "10.0.2.2"))
        world.wait(30.0 * away)
        for path in (0, 1):
            world.heal(path=path)
        world.wait(there)
    assert world.judge.findings == {}
    assert [len(world.link(path).flaps) for path in (0, 1)] == [0, 0]


@given(LOSSES, st.integers(0, 13))
@example([(2, 60, B, "carrier"), (2, 1, B, "silent"), (41, 70, B, "silent")], 0)
@example([(2, 60, B, "carrier"), (2, 1, B, "silent"), (41, 70, B, "silent")], 1)
@example([(2, 70, B, "carrier")], 0)  # it is at fault at the end
@settings(max_examples=25, deadline=None)
def test_an_agent_that_is_restarted_at_any_time_finds_the_same(
    losses: list[tuple[int, int, str, str]], when: int
) -> None:
    """Each path, if not at once, then later by as much as the path had been whole: that is counted anew."""
    steady, renewed = (two_peers(window_s=200) for _ in range(2))
    counted_s = 0.0
    for number, (pause, length, remote, reason) in enumerate(losses):
        for world in (steady, renewed):
            world.wait(pause / 2)
            world.lose(remote=remote, reason=reason)
            world.wait(length / 2)
            world.heal(remote=remote)
            world.wait(1)
        if number == when:
            counted_s = max(
                (renewed.now - found.whole for found in findings(renewed) if found.whole is not None), default=0
            )
            memory = msgspec.json.decode(msgspec.json.encode(renewed.judge.memory()), type=Memory)
            renewed.judge = Judge(renewed.limits)
            renewed.judge.remember(memory, renewed.now)
            renewed.wait(0.5)
            steady.wait(0.5)
    expected, found = gist(steady), [gist(renewed)]
    for _ in range(round(2 * (counted_s + 1))):
        renewed.wait(0.5)
        found.append(gist(renewed))
    for path in expected.keys() | found[0].keys():
        assert expected.get(path) in [one.get(path) for one in found], path


def findings(world: World) -> list[Finding]:
    return list(world.judge.findings.values())


def gist(world: World) -> dict[str, tuple[Kind, bool]]:
    return {local: (found.kind, found.ours) for local, found in world.judge.findings.items()}
