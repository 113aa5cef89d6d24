"""`torchrelay doctor --layout`: what would be lost, and with how many ranks or which node."""

from __future__ import annotations

import pytest

from torchrelay.cli.diagnose.layout import RESTART, Holder, Intervals, copied_elsewhere, page, summary, survey, text_of


def holders(*shards: str, per_node: int = 2) -> list[Holder]:
    return [Holder(rank, f"node-{rank // per_node}", shard) for rank, shard in enumerate(shards)]


@pytest.mark.parametrize(
    ("shards", "losses", "nodes"),
    [
        (["all"] * 4, 3, ()),
        (["a", "b", "a", "b"], 1, ()),
        (["a", "a", "b", "b"], 1, ("node-0", "node-1")),
        (["a", "b", "c", "c"], 0, ("node-0", "node-1")),
        (["a", "b", "a", "b", "a", "b"], 2, ()),
        (["a"] * 2, 1, ("node-0",)),
    ],
)
def test_what_may_be_lost(shards: list[str], losses: int, nodes: tuple[str, ...]) -> None:
    told = survey("job", holders(*shards))
    assert (told.losses, told.nodes) == (losses, nodes)


def test_each_rank_is_told_where_its_state_would_come_from() -> None:
    told = survey("job", holders("a", "a", "b", "a", "b", "c"))
    assert [text_of(one, told) for one in told.ranks] == [
        "ranks 1, 3",
        "ranks 0, 3",
        "rank 4",
        "ranks 0, 1",
        "rank 2",
        RESTART,
    ]
    assert [one.elsewhere for one in told.ranks] == [(3,), (3,), (4,), (0, 1), (2,), ()]
    near = survey("job", holders("a", "a"))
    assert text_of(near.ranks[0], near) == "rank 1, all on the same node"


def test_it_comes_to_a_sentence() -> None:
    one = survey("job", holders("a", "b", "a", "b"))
    assert summary(one)[0] == "any one rank may be lost without a step lost; so may any one node."
    assert page(one).splitlines()[0].split() == ["rank", "node", "state", "would", "come", "from"]
    none = survey("job", holders("a", "b"))
    assert summary(none)[0].startswith("no rank may be lost without a step lost; no step is lost with a node, unless")


def test_snapshots_take_the_place_of_replicas() -> None:
    told = survey("job", holders("a", "b", "c", "d"), Intervals(alone=10))
    assert copied_elsewhere(told)
    assert text_of(told.ranks[0], told) == "its snapshot, on its node and another"
    assert summary(told)[1] == "Snapshots: with any one rank, or any one node, at most 10 steps are made again."


def test_on_one_node_they_do_not_outlive_it() -> None:
    told = survey("job", holders("a", "b"), Intervals(alone=5))
    assert not copied_elsewhere(told)
    assert text_of(told.ranks[0], told) == "its snapshot, on its own node"
    assert summary(told)[1] == "Snapshots: with any one rank at most 5 steps are made again."


def test_with_two_buddies_any_two_nodes_may_be_lost() -> None:
    told = survey("job", holders("a", "b", "c", "d", "e", "f"), Intervals(alone=10, buddies=2))
    assert text_of(told.ranks[0], told) == "its snapshot, on its node and two others"
    assert summary(told)[1] == "Snapshots: with any one rank, or any two nodes, at most 10 steps are made again."
    few = survey("job", holders("a", "b", "c", "d"), Intervals(alone=10, buddies=2))  # there is no third node
    assert text_of(few.ranks[0], few) == "its snapshot, on its node and another"


def test_where_all_is_replicated_none_are_taken() -> None:
    told = survey("job", holders("a", "a", "a"), Intervals(alone=10))
    assert told.snapshot_every == 0
    assert len(summary(told)) == 2
