"""What a script communicates between its calls, in no section, is said once, with its line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

from torchrelay.worker.step.between import EVERY, FIRST, Between


@pytest.fixture
def alone(become: Callable[[int], None]) -> None:
    become(0)
    return


class Script:
    """Makes calls, and something between them."""

    def __init__(self) -> None:
        self.begun = 0
        self.said: list[str] = []
        self.between = Between(lambda: self.begun, self.said.append)

    def communicate(self) -> None:
        self.begun += 1
        dist.all_reduce(torch.ones(1))

    def go(self, gaps: int, act: Callable[[int], None]) -> None:
        for gap in range(1, gaps + 1):
            self.between.leave()
            act(gap)
            self.between.enter()


@pytest.mark.usefixtures("alone")
class TestACollective:
    def test_in_each_gap_is_said_in_the_second_with_its_line(self) -> None:
        script = Script()
        script.go(20, lambda _: script.communicate())
        (said,) = script.said
        assert said.startswith("test_between.py:")
        assert "calls allreduce between two calls" in said
        assert "run.atomic(function, ...)" in said

    def test_now_and_then_is_said_when_a_look_has_met_it(self) -> None:
        script = Script()
        script.go(3 * EVERY, lambda gap: script.communicate() if gap % 16 == 0 else None)
        assert len(script.said) == 1

    def test_inside_a_call_is_nobodys_business(self) -> None:
        script = Script()
        for _ in range(2 * EVERY):
            script.communicate()
            script.go(1, lambda _: None)
        assert not script.said

    def test_of_another_thread_is_not_said(self) -> None:
        script = Script()

        def elsewhere(_: int) -> None:
            script.begun += 1

        script.go(FIRST + 2, elsewhere)
        assert not script.said
