"""What is held against a node for its paths: each taint is asked for once, and none is left behind."""

from __future__ import annotations

from torchrelay.agent.network.findings import Finding, Kind, Register, Where
from torchrelay.protocol.messages.events import Event, TaintCleared, TaintSet
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.wire.messages.pathnews import SOURCE

NODE = NodeId("node-0")


def finding(local: str, path: int = 0) -> Finding:
    return Finding(
        path=path,
        interface="eth1",
        local=local,
        remotes=("10.0.1.9",),
        kind=Kind.DOWN,
        where=Where.HERE,
        ours=True,
        evidence=f"path {local} lost",
        since=1.0,
    )


def register() -> tuple[Register, list[Event]]:
    told: list[Event] = []
    return Register(NODE, places_of=lambda _: (None,), tell=told.append), told


def test_two_paths_of_one_name_have_a_taint_each_and_are_told_once() -> None:
    ours, told = register()
    names = {"10.0.1.1": "path1", "10.0.2.1": "path1"}  # two processes do not count their paths in the same order
    for _ in range(3):
        ours.follow([finding(local) for local in names], names)
    assert [event.key for event in told if isinstance(event, TaintSet)] == ["network/path1", "network/10.0.2.1"]
    ours.follow([finding("10.0.2.1")], names)
    assert [event.key for event in told if isinstance(event, TaintCleared)] == ["network/path1"]
    assert (ours.key_of("10.0.1.1"), ours.key_of("10.0.2.1")) == ("", "network/10.0.2.1")


def test_a_taint_of_an_agent_whose_memory_is_lost_is_lifted_once() -> None:
    ours, told = register()
    ours.follow([finding("10.0.1.1")], {"10.0.1.1": "eth1"})
    told.clear()
    lying = [(None, "network/eth1"), (None, "network/eth2"), (3, "network/eth1")]
    ours.compare(lying)
    lifted = [TaintCleared(node=NODE, slot=slot, key=key, source=SOURCE, yields=True) for slot, key in lying[1:]]
    assert told == lifted
    ours.compare(lying)
    assert told == lifted, "it is on its way"
    for event in lifted:
        ours.acked(event)
    assert [held.key for held in ours.held] == ["network/eth1"]
    ours.compare(lying[:1])
    assert told == lifted


def test_a_lifted_one_that_was_not_heard_yet_is_not_lifted_twice() -> None:
    ours, told = register()
    ours.follow([finding("10.0.1.1")], {"10.0.1.1": "eth1"})
    ours.follow([], {})
    ours.compare([(None, "network/eth1")])
    assert [type(event) for event in told] == [TaintSet, TaintCleared]
