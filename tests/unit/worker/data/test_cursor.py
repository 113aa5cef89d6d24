"""A replacement's script comes to the place that the record tells, whatever the shape of its loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from torchrelay.errors import RefusedError
from torchrelay.protocol.messages.ids import START, Point
from torchrelay.worker.data import cursor as places
from torchrelay.worker.data.cursor import Call, Cursor, Diverged, Frame, LoopRecord, decode_record


class Safepoint(Exception):
    """The replacement has come to the safepoint."""


@dataclass
class World:
    """A run without torch: loops over ranges, and calls that count."""

    record: LoopRecord | None = None
    die_at: Point | None = None  # the life ends at the call after this commit
    told: list[str] = field(default_factory=list)  # what the script says; from `die_at` on, if that is set
    points: list[Point] = field(default_factory=list)
    left: bytes = b""  # the record of `die_at`

    def __post_init__(self) -> None:
        self.cursor = Cursor(self.record)

    def loop(self, kind: str, count: int) -> Iterator[int]:
        opened = self.cursor.open(kind)
        frame = opened.frame
        try:
            if opened.recorded:
                if frame.count == 0:
                    return
                self.cursor.enter_item(frame)
                yield frame.count - 1
            while frame.count < count:
                self.cursor.next_item(frame, b"", b"")
                yield frame.count - 1
        finally:
            self.cursor.close(frame)

    def call(self, kind: str, name: str) -> str:
        if self.cursor.replaying:
            recorded = self.cursor.replay_call(kind)
            assert recorded.result is not None
            if not self.cursor.replaying:
                self.left = self.cursor.record()
            return recorded.result.decode()
        if self.left:
            raise Safepoint
        here = self.cursor.point
        point = here.after_step() if kind == "step" else here.after_section()
        entry = self.cursor.begin_call(kind, point)
        entry.result = f"{name} -> {point}".encode()
        self.cursor.point = point
        self.points.append(point)
        if point == self.die_at:
            self.left = self.cursor.record()
            self.told.clear()
        return entry.result.decode()

    def tell(self, text: object) -> None:
        self.told.append(str(text))

    def step(self, name: str) -> str:
        return self.call("step", name)

    def section(self, name: str) -> str:
        return self.call("section", name)


def plain(world: World) -> None:
    for epoch in world.loop("epochs", 3):
        for batch in world.loop("batches", 4):
            loss = world.step(f"e{epoch} b{batch}")
            world.tell(f"{loss}, {world.cursor.point.step} committed")
        world.tell(f"epoch {epoch} ended with {loss}")
        world.tell(world.section(f"evaluate {epoch}"))
    world.tell(f"{epoch} {batch} {loss}")
    world.tell(world.section("digest"))


def breaking(world: World) -> None:
    for epoch in world.loop("epochs", 100):
        world.tell(world.section(f"shuffle {epoch}"))
        for batch in world.loop("batches", 5):
            world.tell(world.step(f"e{epoch} b{batch}"))
            if world.cursor.point.step % 3 == 0:
                break
        if world.cursor.point.step > 7:
            break
        world.tell(batch)
    world.tell(world.section("end"))
    world.tell(world.section("really"))


def several_loops_in_an_item(world: World) -> None:
    for epoch in world.loop("epochs", 2):
        for first in world.loop("batches", 2):
            world.tell(world.step(f"first {first}"))
            world.tell(world.step(f"again {first}"))
        for _ in world.loop("batches", 0):
            raise AssertionError("an empty loop")
        for second in world.loop("batches", 3):
            if second == 1:
                continue
            world.tell(world.step(f"second {first} {second}"))
        world.tell(world.section(f"{epoch} {first} {second}"))


def straight(world: World) -> None:
    for number in range(6):
        world.tell(world.step(str(number)))


def held_iterator(world: World) -> None:
    steps = world.loop("steps", 9)
    while world.cursor.point.step < 9:
        number = next(steps)
        world.tell(world.step(str(number)))
        if number % 3 == 2:
            world.tell(world.section("block"))


def looking_first(world: World) -> None:
    """Leaves its loop at the beginning of an item, by what is committed then."""
    for _ in world.loop("epochs", 3):
        for batch in world.loop("batches", 9):
            if world.cursor.point.step % 4 == 3:
                break
            world.tell(world.step(str(batch)))
        world.tell(world.section(f"after {batch}"))
        world.tell(world.step("one more"))


SCRIPTS = [looking_first, plain, breaking, several_loops_in_an_item, straight, held_iterator]


def go(script: Callable[[World], None], world: World) -> World:
    """Run the script in this world, to its end or to the safepoint."""
    try:
        script(world)
    except Safepoint:
        pass
    return world


CASES = [(script, point) for script in SCRIPTS for point in go(script, World()).points]


@pytest.mark.parametrize(("script", "point"), CASES, ids=[f"{s.__name__}-{p}" for s, p in CASES])
def test_a_replacement_comes_to_the_same_place_and_sees_the_same(script: Callable[[World], None], point: Point) -> None:
    before = go(script, World(die_at=point))
    after = go(script, World(decode_record(before.left)))
    assert not after.cursor.replaying
    assert after.cursor.point == point
    assert after.left == before.left
    # After the point both scripts see the same variables, those of loops that are over included.
    assert after.told[len(after.told) - len(before.told) :] == before.told


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_replacements_replacement_comes_there_too(script: Callable[[World], None]) -> None:
    for point in go(script, World()).points:
        first = go(script, World(die_at=point))
        second = go(script, World(decode_record(first.left)))
        third = go(script, World(decode_record(second.left)))
        assert (third.left, third.told) == (second.left, second.told)


# ---------------------------------------------------------------- what is refused


def test_two_loops_that_advance_together_are_refused() -> None:
    world = World()
    with pytest.raises(RefusedError, match="lie within one another"):
        for _ in zip(world.loop("batches", 3), world.loop("batches", 3), strict=True):
            pass


def test_a_loop_that_was_left_without_being_closed_is_closed_by_the_next_item() -> None:
    world = World()
    kept = []
    for number in world.loop("epochs", 2):
        inner = world.loop("batches", 5)
        kept.append(inner)
        next(inner)
        world.step(str(number))
    assert [frame.kind for frame in world.cursor.frames] == ["script"]
    with pytest.raises(RefusedError):
        next(kept[0])


def test_calls_without_end_in_one_item_are_refused() -> None:
    world = World()
    for _ in range(places.MAX_TRACE):
        world.step("untracked")
    with pytest.raises(RefusedError, match=r"run\.batches"):
        world.step("one more")


def test_a_call_that_is_dropped_leaves_no_trace() -> None:
    cursor = Cursor()
    before = cursor.record()
    cursor.drop_call(cursor.begin_call("step", Point(1)))
    assert cursor.record() == before


def test_an_iterator_of_a_loop_may_end_twice() -> None:
    world = World()
    loop = world.loop("steps", 1)
    assert list(loop) == [0]
    assert list(loop) == []


class TestAnotherPath:
    """A replacement's script that does not do what the lost worker's did is stopped, and told."""

    def meet(self, script: Callable[[World], None], other: Callable[[World], None], point: Point) -> None:
        go(other, World(decode_record(go(script, World(die_at=point)).left)))

    def test_another_call(self) -> None:
        with pytest.raises(Diverged, match="calls a section where the lost worker came to the step of 1"):
            self.meet(straight, lambda world: world.tell(world.section("x")), Point(3))

    def test_a_loop_instead_of_a_call(self) -> None:
        with pytest.raises(Diverged, match="begins a loop of steps"):
            self.meet(straight, lambda world: world.tell(list(world.loop("steps", 3))), Point(3))

    def test_a_call_instead_of_a_loop(self) -> None:
        with pytest.raises(Diverged, match="calls a step"):
            self.meet(plain, straight, Point(2))

    def test_a_loop_that_is_left_early(self) -> None:
        def leaves(world: World) -> None:
            for _ in world.loop("epochs", 3):
                break
            world.step("after")

        with pytest.raises(Diverged, match="leaves a loop of epochs"):
            self.meet(plain, leaves, Point(6))

    def test_a_loop_that_goes_on_without_its_calls(self) -> None:
        def goes_on(world: World) -> None:
            for _ in world.loop("epochs", 3):
                for _ in world.loop("batches", 4):
                    pass

        with pytest.raises(Diverged, match="goes on with a loop of batches"):
            self.meet(plain, goes_on, Point(6))


@pytest.mark.parametrize("data", [b"", b"\xc0", Cursor().record(), b"\x91\x90"])
def test_what_is_no_record_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="record of a script"):
        decode_record(data)


def test_the_start_is_the_point_before_any_call() -> None:
    assert Cursor().point == START


# ---------------------------------------------------------------- what is ahead of a replacement


def on_the_way(*calls: Call | Frame) -> Cursor:
    """A replacement whose rank has made these calls outside of all loops."""
    return Cursor(LoopRecord([Frame("script", trace=list(calls))]))


def section(at: Point, *, still: bool = True) -> Call:
    return Call(kind="section", point=at, result=b"", still=still)


def test_sections_that_leave_the_state_as_it_is_do_not_change_it() -> None:
    step = Call(kind="step", point=Point(1), result=b"")
    cursor = on_the_way(step, section(Point(1, 1)), section(Point(1, 2)))
    assert not cursor.still_ahead(), "a step is ahead"
    assert not cursor.is_behind_changes
    cursor.replay_call("step")
    assert cursor.still_ahead()
    assert cursor.is_behind_changes
    found = cursor.next_entry()
    assert found is not None
    assert found.point == Point(1, 1)
    cursor.replay_call("section")
    assert cursor.still_ahead()


def test_one_that_changes_it_does() -> None:
    step = Call(kind="step", point=Point(1), result=b"")
    cursor = on_the_way(step, section(Point(1, 1), still=False), section(Point(1, 2)))
    cursor.replay_call("step")
    assert not cursor.still_ahead()
    cursor.replay_call("section")
    assert cursor.still_ahead()


def test_sections_before_the_first_step_may_have_changed_it_too() -> None:
    cursor = on_the_way(section(Point(0, 1)), section(Point(0, 2), still=False), section(Point(0, 3)))
    cursor.replay_call("section")
    assert not cursor.is_behind_changes
    cursor.replay_call("section")
    assert cursor.is_behind_changes
    assert cursor.still_ahead()


def test_a_section_that_is_not_in_the_record_may_have_changed_it() -> None:
    cursor = on_the_way(Call(kind="step", point=Point(1), result=b""), section(Point(1, 2)))
    cursor.replay_call("step")
    assert not cursor.still_ahead()


def test_the_next_call_is_found_behind_a_loop_that_has_no_call_left() -> None:
    step = Call(kind="step", point=Point(1), result=b"")
    loop = Frame("steps", 1, trace=[step, section(Point(1, 1))])
    cursor = on_the_way(loop, section(Point(1, 2)))
    assert isinstance(cursor.next_entry(), Frame)
    opened = cursor.open("steps")
    cursor.enter_item(opened.frame)
    cursor.replay_call("step")
    cursor.replay_call("section")
    assert cursor.still_ahead()
    found = cursor.next_entry()
    assert isinstance(found, Call)
    assert found.point == Point(1, 2)
