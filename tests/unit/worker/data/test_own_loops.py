"""Loops of the script's own: their record does not grow, a replacement finds its way, or they are refused early."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from torchrelay.errors import RefusedError
from torchrelay.protocol.messages.ids import Point
from torchrelay.worker.data.cursor import MAX_STEPS, Call, Cursor, Diverged, LoopRecord, decode_record
from torchrelay.worker.data.own_loops import Places


class Safepoint(Exception):
    """The replacement has come to the safepoint."""


@dataclass
class World:
    """A run without torch. The random state is a number, which a batch raises."""

    record: bytes = b""  # for a replacement
    until: Point = Point(10**9)  # the life ends after this commit
    told: list[str] = field(default_factory=list)
    size: int = 0  # of the last record
    random: int = 0

    def __post_init__(self) -> None:
        self.cursor = Cursor(decode_record(self.record) if self.record else None)
        self.places = Places()
        self.left = self.record

    @property
    def committed(self) -> int:
        if self.cursor.looks:
            turn = self.cursor.ask(self.places.here(1), lambda: str(self.random).encode())
            if turn is not None:
                self.random = int(turn.drawn)
        return self.cursor.point.step

    def batch(self) -> int:
        self.random += 1
        return self.random

    def step(self, given: object = "") -> str:
        return self.call("step", given)

    def section(self, given: object = "") -> str:
        return self.call("section", given)

    def call(self, kind: str, given: object) -> str:
        if self.cursor.looks:
            self.cursor.come(self.places.here(2), step=kind == "step")
        if self.cursor.replaying:
            recorded = self.cursor.replay_call(kind)
            assert recorded.result is not None
            if not self.cursor.replaying:
                self.told.clear()
            self.told.append(f"{kind} {given}")
            return recorded.result.decode()
        if self.record or self.cursor.point == self.until:
            raise Safepoint
        here = self.cursor.point
        point = here.after_step() if kind == "step" else here.after_section()
        call = self.cursor.begin_call(kind, point)
        self.left = self.cursor.record()  # at the gate
        self.size = len(self.left)
        call.result = f"{kind} {given} of {point}".encode()
        self.cursor.point = point
        if point == self.until:
            self.left = self.cursor.record()
            self.told.clear()
        self.told.append(f"{kind} {given}")
        return call.result.decode()

    def items(self, kind: str, count: int) -> Iterator[int]:
        if self.cursor.looks:
            self.cursor.come(self.places.here(1))
        opened = self.cursor.open(kind, count)
        frame = opened.frame
        try:
            if opened.recorded:
                self.random = int(frame.drawn)
                self.cursor.enter_item(frame)
                yield frame.count - 1
            while frame.count < count:
                self.cursor.next_item(frame, b"", str(self.random).encode())
                yield frame.count - 1
        finally:
            self.cursor.close(frame)


def plain(world: World) -> None:
    while world.committed < 60:
        world.step(world.batch())
    world.section("end")


def with_sections(world: World) -> None:
    world.section("begin")
    while world.committed < 60:
        if world.committed % 7 == 0:
            world.section(f"evaluate {world.committed}")
        world.step(world.batch())
        if world.committed % 5 == 0:
            world.section(f"save {world.committed}")
    world.section("end")


def by_a_break(world: World) -> None:
    began = world.committed
    while True:
        if world.committed - began >= 60:
            break
        world.step(world.batch())
    world.section(f"end {began}")


def by_a_function(world: World) -> None:
    def more() -> bool:
        return world.committed < 60

    while more():
        turn(world)
    world.section("end")


def turn(world: World) -> None:
    world.step(world.batch())
    if world.committed % 10 == 0:
        world.section("save")


def one_in_another(world: World) -> None:
    for epoch in world.items("epochs", 2):
        while world.committed < 40 * (epoch + 1):
            world.step(world.batch())
        world.section(f"epoch {epoch}")


def one_after_another(world: World) -> None:
    while world.committed < 30:
        world.step(world.batch())
    world.section("half")
    while world.committed < 60:
        world.step(world.batch())
    world.section("end")


def tracked_inside(world: World) -> None:
    while world.committed < 60:
        for item in world.items("batches", 3):
            world.step((world.batch(), item))
        world.section(f"epoch {world.committed}")


def many_steps_in_a_turn(world: World) -> None:
    while world.committed < 96:
        world.section("play")
        for at in range(24):
            world.step((world.batch(), at))


def counter_in_an_item(world: World) -> None:
    """Its calls are all kept, and so its counter comes to where it was."""
    for _ in world.items("epochs", 2):
        count = 0
        while count < 40:
            world.step((world.batch(), count))
            if world.committed % 5 == 0:
                world.section("save")
            count += 1


SCRIPTS = [
    plain, with_sections, by_a_break, by_a_function, one_in_another, one_after_another, tracked_inside,
    many_steps_in_a_turn, counter_in_an_item,
]  # fmt: skip


def go(script: Callable[[World], None], world: World) -> World:
    """Run the script, to its end or to the safepoint. In a thread: it is called from the same place each time."""
    with ThreadPoolExecutor(1) as thread:
        try:
            thread.submit(script, world).result()
        except Safepoint:
            pass
    return world


def points_of(script: Callable[[World], None]) -> list[Point]:
    points: list[Point] = []
    world = World()
    begin = world.cursor.begin_call

    def noted(kind: str, point: Point, given: bytes = b"") -> Call:
        points.append(point)
        return begin(kind, point, given)

    world.cursor.begin_call = noted  # type: ignore[method-assign]
    script(world)
    return points


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_replacement_comes_to_the_same_place_with_the_same_batches(script: Callable[[World], None]) -> None:
    for point in points_of(script)[20::7]:
        before = go(script, World(until=point))
        after = go(script, World(before.left))
        assert not after.cursor.replaying, point
        assert after.cursor.point == point
        assert after.told[:1] == before.told[:1] != [], point
        # And its replacement, by what it hands on.
        again = go(script, World(before.left))
        assert again.cursor.record() == after.cursor.record()


@pytest.mark.parametrize("script", SCRIPTS[:-2])
def test_the_record_does_not_grow(script: Callable[[World], None]) -> None:
    sizes = [go(script, World(until=point)).size for point in points_of(script)[-30:]]
    assert max(sizes) < 520, sizes


def test_a_loop_may_go_on_for_ever() -> None:
    world = World()
    while world.committed < 20_000:
        world.step(world.batch())
    assert world.size < 400


class TestNoWayToTell:
    def test_a_counter_is_refused_in_the_first_steps(self) -> None:
        def script(world: World) -> None:
            count = 0
            while count < 6000:
                world.step(world.batch())
                if world.committed % 100 == 0:
                    world.section("save")
                count += 1

        self.refused(script)

    def test_a_range_is_refused_in_the_first_steps(self) -> None:
        def script(world: World) -> None:
            for _ in range(6000):
                if world.committed % 2 == 0:
                    world.section("x")
                world.step()

        self.refused(script)

    def refused(self, script: Callable[[World], None]) -> None:
        world = World()
        with pytest.raises(RefusedError, match=r"test_own_loops\.py:\d+ outside of all tracked loops.*run\.steps"):
            go(script, world)
        assert world.cursor.point.step == MAX_STEPS

    def test_a_few_steps_and_many_sections_are_let_be(self) -> None:
        world = World()
        for _ in range(MAX_STEPS):
            world.step()
        for _ in range(100):
            world.section()

    def test_another_place_is_told(self) -> None:
        left = go(plain, World(until=Point(30))).left

        def other(world: World) -> None:
            while world.cursor.point.step < 60:
                world.step(world.batch())

        with pytest.raises(Diverged, match=r"calls a step where the lost worker asked for run\.global_step at .*\.py:"):
            go(other, World(left))


def test_another_length_is_told_with_the_remedy() -> None:
    def script(world: World, count: int) -> None:
        for _ in world.items("epochs", count):
            world.step()

    left = go(lambda world: script(world, 4), World(until=Point(3))).left
    with pytest.raises(Diverged, match=r"2 items. That of the lost worker had 4.*torchrelay\.once"):
        go(lambda world: script(world, 2), World(left))


def test_a_record_with_a_skip_is_read_back() -> None:
    record = decode_record(go(plain, World(until=Point(30))).left)
    assert isinstance(record, LoopRecord)
    assert record.last is not None
    assert record.last.point == Point(30)
