"""The network protocol, in C: its stories, simulated worlds, every state of a small one, and hostile frames."""

from __future__ import annotations

from tests import netpath_mutants
from tests.support.netpath_changes import CHANGES, EQUIVALENT
from tests.support.netpath_protocol import (
    RULES_AND_SEEDS,
    SANITIZED,
    Built,
    built,  # noqa: F401  a fixture
    holds,
    rules,
)


def test_stories_hold(built: Built) -> None:
    holds(built("stories", SANITIZED))


def test_what_the_kernel_says_of_links_is_understood(built: Built) -> None:
    holds(built("links", SANITIZED))


def test_a_seed_has_one_story(built: Built) -> None:
    world = built("world", SANITIZED)
    story = holds(world, "--story", "7")
    assert story == holds(world, "--story", "7")
    assert "posts message 0" in story


def test_each_rule_of_the_engine_is_shown_to_be_needed() -> None:
    assert set(RULES_AND_SEEDS) == set(rules())


def test_changes_fit_the_protocol() -> None:
    texts = netpath_mutants.sources()
    for change in CHANGES:
        assert netpath_mutants.mutated(change, texts) != texts
    names = [change.name for change in CHANGES]
    assert len(set(names)) == len(names)
    assert set(EQUIVALENT) <= set(names)
