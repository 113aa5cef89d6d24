"""Slow paths: what a path usually carries, and when it carries much less."""

from __future__ import annotations

import pytest

from tests.support.network_world import A, B, World, local_of, two_peers
from torchrelay.agent.network.findings import Finding, Kind, Where
from torchrelay.agent.network.rates import BUCKET_S, LEAST, LEAST_RATE, Rates

FIRST = local_of(0)
HOUR_S = 3600.0


def found(world: World) -> Finding:
    finding = world.finding()
    assert finding is not None
    return finding


def fill(rates: Rates[str], now: float, buckets: int, waits: str = "", **paths: float) -> float:
    """So many buckets in which each path sent so many bytes a second; the time afterwards.

    Round trips over the path that `waits` are twice as long.
    """
    for _ in range(buckets):
        now += BUCKET_S
        for path, rate in paths.items():
            rates.add(path, round(rate * BUCKET_S), 0)
            rates.time(path, 2000 if path == waits else 1000)
        rates.pass_time(now)
    return now


class TestRates:
    def test_what_is_usual_is_the_median_of_times_with_traffic(self) -> None:
        rates: Rates[str] = Rates(0.5)
        rates.pass_time(0.0)
        now = fill(rates, 0.0, LEAST - 1, a=10e6, b=10e6)
        assert rates.part("a") is None, "too little is known"
        now = fill(rates, now, 100, a=0, b=LEAST_RATE / 2)
        assert rates.part("a") is None, "times without traffic teach nothing"
        fill(rates, now, 1, a=5e6, b=10e6)
        assert rates.part("a") == pytest.approx(0.5)
        assert rates.last("a") == pytest.approx((5e6, 0.0))

    def test_how_long_a_path_is_slow(self) -> None:
        rates: Rates[str] = Rates(0.5)
        rates.pass_time(0.0)
        now = fill(rates, 0.0, 10, a=10e6, b=10e6)
        now = fill(rates, now, 3, "a", a=4e6, b=10e6)
        assert (rates.low_s("a"), rates.low_s("b")) == (3 * BUCKET_S, 0.0)
        now = fill(rates, now, 3, a=4e6, b=1e6)
        assert rates.low_s("a") == 3 * BUCKET_S, "without load by which it could be told it is as it was"
        now = fill(rates, now, 200, "a", a=4e6, b=10e6)
        assert rates.part("a") == pytest.approx(0.4), "what is slow does not become usual"
        fill(rates, now, 1, a=6e6, b=10e6)
        assert rates.low_s("a") == 0.0

    def test_the_load_of_the_others_is_the_measure(self) -> None:
        rates: Rates[str] = Rates(0.5)
        rates.pass_time(0.0)
        now = fill(rates, 0.0, 10, a=10e6, b=10e6)
        now = fill(rates, now, 3, "a", a=3e6, b=5e6)
        assert rates.low_s("a") == 0.0, "all have half as much: 3 is more than half of 5"
        fill(rates, now, 3, "a", a=2e6, b=5e6)
        assert rates.low_s("a") == 3 * BUCKET_S

    def test_a_path_that_carries_its_usual_is_not_slow_though_the_others_carry_more(self) -> None:
        rates: Rates[str] = Rates(0.5)
        rates.pass_time(0.0)
        now = fill(rates, 0.0, 10, a=10e6, b=10e6)
        fill(rates, now, 3, "a", a=8e6, b=40e6)
        assert rates.low_s("a") == 0.0

    def test_a_path_that_is_left_aside_is_not_slow(self) -> None:
        rates: Rates[str] = Rates(0.5)
        rates.pass_time(0.0)
        now = fill(rates, 0.0, 10, a=10e6, b=10e6)
        now = fill(rates, now, 30, a=1e6, b=10e6)
        assert rates.low_s("a") == 0.0, "its round trips are as ever: there was less to send"
        fill(rates, now, 3, "a", a=1e6, b=10e6)
        assert rates.low_s("a") == 0.0, "what has become usual is usual"

    def test_paths_that_are_gone_are_forgotten(self) -> None:
        rates: Rates[str] = Rates(0.5)
        rates.pass_time(0.0)
        fill(rates, 0.0, 10, a=10e6, b=10e6)
        rates.keep(["b"])
        assert (rates.part("a"), rates.low_s("a"), rates.last("a")) == (None, 0.0, (0.0, 0.0))
        assert rates.part("b") == pytest.approx(1.0)


class TestSlow:
    def busy(self, **limits: float) -> World:
        world = two_peers(**limits)
        for figures in world.links.values():
            figures.rate = 50e6
        world.wait(120)
        return world

    def slow_down(self, world: World, rate: float, *remotes: str) -> None:
        for remote in remotes:
            figures = world.links[1, 0, remote]
            figures.rate, figures.round_trip_us = rate, 250 if rate >= 50e6 else 1000

    def test_a_path_that_carries_less_than_half_for_its_time_is_found(self) -> None:
        world = self.busy()
        self.slow_down(world, 20e6, A, B)
        world.wait(55)
        assert world.judge.findings == {}
        world.wait(15)
        assert (found(world).kind, found(world).where, world.ours) == (Kind.SLOW, Where.HERE, [FIRST])
        assert "40.0 of its usual 100.0 MB/s" in found(world).evidence

    def test_to_one_of_several_peers_it_is_the_far_end(self) -> None:
        world = self.busy()
        self.slow_down(world, 2e6, A)
        self.slow_down(world, 45e6, B)
        world.wait(70)
        assert (found(world).where, found(world).remotes, world.ours) == (Where.THERE, (A,), [])

    def test_one_direction_is_enough(self) -> None:
        world = self.busy()
        for remote in (A, B):
            world.links[1, 0, remote].receives, world.links[1, 0, remote].round_trip_us = 5e6, 900
        world.wait(70)
        assert world.ours == [FIRST]
        assert "receives 10.0 of its usual 100.0 MB/s" in found(world).evidence

    def test_more_than_half_is_not_slow(self) -> None:
        world = self.busy()
        self.slow_down(world, 30e6, A, B)
        world.wait(600)
        assert world.judge.findings == {}

    def test_when_there_is_less_to_send_no_path_is_slow(self) -> None:
        world = self.busy()
        for figures in world.links.values():
            figures.rate = 2e6
        world.wait(600)
        assert world.judge.findings == {}, "an evaluation"
        for figures in world.links.values():
            figures.rate = 20e6
        self.slow_down(world, 12e6, A, B)
        world.wait(600)
        assert world.judge.findings == {}, "half the job has moved away"

    def test_a_path_that_the_core_leaves_aside_is_not_slow(self) -> None:
        world = self.busy()
        for remote in (A, B):
            world.links[1, 0, remote].rate = 1e6
        world.wait(600)
        assert world.judge.findings == {}

    def test_pauses_are_neither_slow_nor_well(self) -> None:
        world = self.busy()
        self.slow_down(world, 20e6, A, B)
        world.wait(40)
        rates = {link: figures.rate for link, figures in world.links.items()}
        for figures in world.links.values():
            figures.rate = 0
        world.wait(300)
        assert world.judge.findings == {}
        for link, figures in world.links.items():
            figures.rate = rates[link]
        world.wait(30)
        assert world.ours == [FIRST]

    def test_with_one_path_nothing_can_be_told(self) -> None:
        world = World().use((1, 0, A))
        world.links[1, 0, A].rate = 50e6
        world.wait(120)
        world.links[1, 0, A].rate = 5e6
        world.wait(600)
        assert world.judge.findings == {}

    def test_a_path_that_was_slow_from_the_beginning_is_as_usual(self) -> None:
        world = two_peers()
        for (_, path, _), figures in world.links.items():
            figures.rate = 10e6 if path else 100e6
        world.wait(900)
        assert world.judge.findings == {}

    def test_it_is_over_when_it_carries_its_usual_again(self) -> None:
        world = self.busy(heal_s=30)
        self.slow_down(world, 20e6, A, B)
        world.wait(80)
        assert world.ours == [FIRST]
        self.slow_down(world, 50e6, A, B)
        world.wait(60)
        assert world.judge.findings == {}

    def test_where_nobody_sends_any_more_it_is_not_taken_back_for_an_hour(self) -> None:
        world = self.busy(heal_s=10)
        self.slow_down(world, 20e6, A, B)
        world.wait(80)
        world.links.clear()
        world.judge.paths.ended(1, world.now)
        for _ in range(10):
            world.judge.paths.probed((FIRST, A), True, world.now)
            world.wait(30)
        assert world.ours == [FIRST]
        world.now += HOUR_S
        world.judge.paths.probed((FIRST, A), True, world.now)
        world.wait(15)
        assert world.judge.findings == {}
