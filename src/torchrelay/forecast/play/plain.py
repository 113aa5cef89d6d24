"""Plain ways of getting over faults: from a checkpoint, without a replica group, or with a given coverage.

They need no protocol: a fault takes a node, a spare takes its place, and stages of known length follow one another. A
fault in the middle of them begins them anew.
"""

from __future__ import annotations

import math

from torchrelay.forecast.inputs.faults import Cause, Fault
from torchrelay.forecast.inputs.settings import SECOND_H, Short, Strategy
from torchrelay.forecast.play.buckets import Bucket
from torchrelay.forecast.play.engine import World
from torchrelay.forecast.play.spares import Bench
from torchrelay.protocol.model.incident import Resolution

Stages = list[tuple[Bucket, float]]


class Restart:
    """All start again from the last checkpoint; with spares that are hot, sooner."""

    def __init__(self, world: World) -> None:
        settings = world.settings
        self.world = world
        self.costs = settings.costs
        self.bench = Bench(settings.spares, settings.floating, world.usage)
        self.members = set(range(settings.nodes))
        self.waiting_nodes = set(range(settings.nodes, settings.pool))  # dedicated spares
        self.lent = list(range(settings.pool, settings.pool + settings.floating))
        self.lent_down: set[int] = set()
        self.missing = 0
        self.stages: Stages = []
        self.until_h = math.inf
        self.waits = False  # for a node
        self._waits_since = 0.0

    # ------------------------------------------------------------ as the engine sees it

    @property
    def speed(self) -> float:
        return 0.0 if self.stages or self.waits else self.full_speed()

    def full_speed(self) -> float:
        return (self.world.settings.nodes - self.missing) / self.world.settings.nodes

    @property
    def bucket(self) -> Bucket:
        return self.stages[0][0] if self.stages and not self.waits else Bucket.RECOVERY

    def due_h(self) -> float:
        return self.until_h if self.stages and not self.waits else math.inf

    def fault(self, fault: Fault) -> bool:
        if fault.node in self.waiting_nodes:
            if fault.cause is not Cause.PROCESS:
                self.waiting_nodes.discard(fault.node)
                self.bench.ready -= 1
            return False
        if fault.node in self.lent and fault.cause is not Cause.PROCESS:
            self.lent.remove(fault.node)
            self.bench.floating -= 1
            self.lent_down.add(fault.node)
        if fault.node not in self.members:
            return False
        if fault.cause is not Cause.PROCESS and not self.bench.unlimited:
            self.members.discard(fault.node)
            self.missing += 1
        self.suffer(fault)
        return True

    def suffer(self, _: Fault) -> None:
        self.world.verdicts[Resolution.FELL_BACK] += not self.stages
        self.world.roll_back()
        self.begin(self.bring_up())

    def repaired(self, node: int) -> None:
        if node in self.lent_down:  # it was another job's
            self.lent_down.discard(node)
            self.lent.append(node)
            self.bench.floating += 1
        else:
            self.keep(node)
        if self.waits:
            self.stop_waiting()
            self.begin(self.stages)

    def keep(self, node: int) -> None:
        """A node of ours is well again."""
        if self.waits:
            self.bench.ready += 1
        else:
            self.bench.give()
        if self.bench.ready > len(self.waiting_nodes):
            self.waiting_nodes.add(node)
        else:  # somebody else's job gets it for the node that it has given up
            self.lent.append(node)

    def uses(self, node: int) -> bool:
        return node in self.members

    def warned(self, node: int) -> None:
        """Nothing follows: without migration a warning is of no use."""

    def cleared(self, node: int) -> None:
        """As with `warned`."""

    def act(self) -> None:
        """A stage is over."""
        self.stages = self.stages[1:]
        if self.stages:
            self.until_h = self.world.now_h + self.stages[0][1]

    def close(self) -> None:
        if self.waits:
            self.stop_waiting()

    # ------------------------------------------------------------ recovering

    def begin(self, stages: Stages) -> None:
        """Get nodes for the places that have none, and go through the stages. Without a node: wait, or shrink."""
        preempted = False
        while self.missing:
            got = self.bench.take()
            if got is None:
                break
            preempted = preempted or got > 0
            source = self.lent if got else sorted(self.waiting_nodes)
            node = source[0]
            (self.lent.remove if got else self.waiting_nodes.discard)(node)
            self.members.add(node)
            self.missing -= 1
        if preempted:
            stages = [(Bucket.RECOVERY, self.world.settings.preempt_h), *stages]
        self.stages = stages
        if self.missing and (self.world.settings.short is Short.WAIT or not self.members):
            self.start_waiting()
        self.until_h = self.world.now_h + (stages[0][1] if stages else 0.0)

    def start_waiting(self) -> None:
        if not self.waits:
            self.waits, self._waits_since = True, self.world.now_h

    def stop_waiting(self) -> None:
        self.waits = False
        self.world.usage.waited_h += self.world.now_h - self._waits_since

    def bring_up(self) -> Stages:
        """R, S, B; tried again as often as they fail."""
        costs, about = self.costs, self.world.about
        hot = self.world.settings.strategy is Strategy.HOT_SPARE and (self.bench.unlimited or self.bench.ready > 0)
        once: Stages = [
            (Bucket.RECOVERY, costs.detect_h), (Bucket.RECOVERY, costs.replacement_h),
            (Bucket.RESTORE, costs.restore_h), (Bucket.STARTUP, costs.startup_h),
        ]  # fmt: skip
        if hot:
            once = [(Bucket.RECOVERY, costs.detect_h), (Bucket.RECOVERY, costs.hot_h)]
        stages = [(bucket, about(hours)) for bucket, hours in once if hours > 0]
        while costs.retry and self.world.chance.random() < costs.retry:
            stages += [(bucket, about(hours)) for bucket, hours in once if hours > 0]
        return stages


class Covered(Restart):
    """A given share of the faults costs a pause only; the others go back to a checkpoint."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.falls_back = False  # the recovery under way goes back to a checkpoint
        self.told_clean = False  # it was counted as clean
        self.left: set[int] = set()  # nodes that were left because of a warning

    def suffer(self, _: Fault) -> None:
        if not self.stages:
            self.falls_back = self.told_clean = False
        if self.falls_back or self.world.chance.random() >= self.costs.coverage:
            self.falls_back = True
            super().suffer(_)
            if self.told_clean:  # what began clean did not end so
                self.told_clean = False
                self.world.verdicts[Resolution.CLEAN] -= 1
                self.world.verdicts[Resolution.FELL_BACK] += 1
        else:
            self.world.verdicts[Resolution.CLEAN] += not self.stages
            self.told_clean = self.told_clean or not self.stages
            self.world.redo_step()
            self.begin([(Bucket.RECOVERY, self.world.about(self.costs.covered_h))])

    def fault(self, fault: Fault) -> bool:
        if fault.node in self.left:
            if fault.cause is not Cause.PROCESS:
                self.left.discard(fault.node)
                return False
            if not self.bench.unlimited:  # nothing of ours runs there; it stays out until its fault or the all-clear
                return False
        return super().fault(fault)

    def warned(self, node: int) -> None:
        """Move away before it fails, if there is a spare."""
        if node not in self.members or self.stages or not (self.bench.unlimited or self.bench.ready):
            return
        self.world.moves += 1
        self.falls_back = self.told_clean = False
        self.left.add(node)
        if not self.bench.unlimited:  # else its number stands for the one in its place, too
            self.members.discard(node)
            self.missing += 1
        self.begin([(Bucket.RECOVERY, self.world.about(self.costs.move_h))])

    def cleared(self, node: int) -> None:
        if node in self.left:
            self.left.discard(node)
            if not self.bench.unlimited:
                self.repaired(node)

    def repaired(self, node: int) -> None:
        self.left.discard(node)
        super().repaired(node)


class TorchFT(Restart):
    """Steps go on without the replica group that is lost, and take longer always. Its batch of that step is dropped."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.layout = world.settings.placed
        self.groups = [self.layout.parts] * self.layout.replicas  # nodes of each replica group that are there
        self.group_of = {node: node // self.layout.parts for node in self.members}
        self.back: list[tuple[float, int]] = []  # when which group is there again
        self.owed: list[int] = []  # groups that wait for a node

    def full_speed(self) -> float:
        there = sum(count == self.layout.parts for count in self.groups)
        return there / len(self.groups) / (1 + self.costs.torchft_step)

    def fault(self, fault: Fault) -> bool:
        group = self.group_of.get(fault.node)
        if group is None:
            return super().fault(fault)
        world = self.world
        if fault.cause is not Cause.PROCESS and not self.bench.unlimited:
            self.members.discard(fault.node)
            del self.group_of[fault.node]
        world.account.dropped_h += world.settings.step_s * SECOND_H / len(self.groups)
        self.groups[group] -= 1
        self.owed.append(group)
        if not self.full_speed():  # nobody is left who has the state
            world.verdicts[Resolution.FELL_BACK] += 1
            world.roll_back()
            self.stages = []
        else:
            self.stages = [(Bucket.RECOVERY, world.about(self.costs.torchft_stall_h))]
            self.until_h = world.now_h + self.stages[0][1]
        self.supply(same=fault.node if fault.node in self.members else None)
        return True

    @property
    def speed(self) -> float:
        return 0.0 if self.stages else self.full_speed()

    def supply(self, same: int | None = None) -> None:
        """Nodes for the groups that wait for one; each takes a bring-up to be there."""
        while self.owed:
            got = 0.0 if same is not None else self.bench.take()
            if got is None:
                return
            group = self.owed.pop(0 if same is None else -1)
            if same is None and not self.bench.unlimited:
                node = self.lent.pop(0) if got else min(self.waiting_nodes)
                self.waiting_nodes.discard(node)
                self.members.add(node)
                self.group_of[node] = group
            same = None
            wait = sum(hours for _, hours in self.bring_up()) + (self.world.settings.preempt_h if got else 0.0)
            self.back.append((self.world.now_h + wait, group))

    def repaired(self, node: int) -> None:
        super().repaired(node)
        self.supply()

    def due_h(self) -> float:
        return min(super().due_h(), min((at for at, _ in self.back), default=math.inf))

    def act(self) -> None:
        if self.stages and super().due_h() <= self.world.now_h:
            super().act()
            return
        first = min(self.back)
        self.back.remove(first)
        self.groups[first[1]] += 1
