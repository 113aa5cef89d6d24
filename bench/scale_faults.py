"""What a large job lives through: faults and a move over the real wire, one after the other, in one job.

    a loss and echo    a worker ends, and all others tell that their collective has failed
    two losses         two workers of different nodes end at the same moment
    second in PHASE    another worker ends when the first order of that phase has come
    move               a node with all its ranks is drained
    node               a node falls silent: its agent and all its workers are gone
    rack               sixteen nodes do, at the same moment

Each is over when the job runs again and all its incidents are closed, with nothing lost. Silence takes its time until
it is believed: `resolved_s` counts from the fault, `orders_s` from the first order that followed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from figures import progress
from scale_players import JOB
from scale_stage import Stage, wait_for
from torchrelay.client.client import Client

RACK = 16  # nodes
SPARE_NODES = RACK + 4
PHASES = {"agreeing": "Interrupt", "preparing": "Decide", "reconfiguring": "Reconfigure", "resuming": "Resume"}
CLOSED = ("clean", "resumed")


class Trials:
    """The job of one stage, and what happens to it."""

    def __init__(self, stage: Stage, limit_s: float) -> None:
        self.stage, self.limit_s = stage, limit_s
        self.client = Client.of(stage.run_dir)
        self._next = 0

    def victims(self, count: int) -> list[int]:
        """Nodes that nothing has happened to."""
        first, self._next = self._next, self._next + count
        return list(range(first, first + count))

    def observe(self, name: str, act: Callable[[int], float]) -> dict[str, float | str]:
        """Let it happen, and wait until it is over. `act` gets the generation that follows; it returns when it was."""
        progress(f"{self.stage.nodes} agents: {name}")
        generation, known = self.stage.generation() + 1, len(self.client.view_incidents(JOB).incidents)
        before = self.stage.cpu_s()
        self.stage.stand()
        at = act(generation)
        wait_for(lambda: self.is_over(generation), self.limit_s, f"{name}: the job does not recover")
        resumed = self.stage.seen("Resume", self.stage.generation())[1]
        begun = min(when for kind, when in self.first_orders(generation))
        found = self.client.view_incidents(JOB).incidents[known:]
        wrong = [one.summary for one in found if one.resolution not in CLOSED or one.lost]
        if wrong or not found:
            raise SystemExit(f"{name}: {wrong or 'no incident was made of it'}")
        self.stage.train()
        return {
            "what": name,
            "resolved_s": resumed - at,
            "orders_s": resumed - begun,
            "generations": float(self.stage.generation() - generation + 1),
            "cpu_s": self.stage.cpu_s() - before,
            "faults": float(sum(len(one.faults) for one in found)),
        }

    def is_over(self, generation: int) -> bool:
        if self.stage.seen("Resume", max(generation, self.stage.generation()))[0] < self.stage.ranks:
            return False
        job = self.client.job(JOB)
        return job.phase == "running" and job.generation >= generation

    def first_orders(self, generation: int) -> Iterator[tuple[str, float]]:
        for one in self.stage.ask("seen"):
            for (kind, known), (_, first, _) in one.items():
                if known >= generation and kind in ("Interrupt", "Halt"):
                    yield kind, first

    # ------------------------------------------------------------ what happens

    def two_losses(self, _generation: int) -> float:
        one, other = self.victims(2)
        return float(min(self.stage.ask("kill", [(one, 0), (other, 1)])))

    def echoed(self, _generation: int) -> float:
        (one,) = self.victims(1)
        at = float(min(self.stage.ask("kill", [(one, 0)])))
        self.stage.ask("echo")
        return at

    def second_in(self, phase: str) -> Callable[[int], float]:
        def act(generation: int) -> float:
            one, other = self.victims(2)
            at = float(min(self.stage.ask("kill", [(one, 0)])))
            order = PHASES[phase]
            wait_for(lambda: self.stage.seen(order, generation)[0] > 0, self.limit_s, f"no {order} comes")
            self.stage.ask("kill", [(other, 1)])
            return at

        return act

    def move(self, _generation: int) -> float:
        (node,) = self.victims(1)
        at = time.monotonic()
        self.client.change("/v1/drain", {"node": f"node-{node}", "reason": "bench"}, dry_run=False)
        return at

    def nodes_lost(self, count: int) -> Callable[[int], float]:
        def act(_generation: int) -> float:
            return float(min(self.stage.ask("vanish", self.victims(count))))

        return act


def measure(stage: Stage, limit_s: float) -> list[dict[str, float | str]]:
    """All of them. The stage has `SPARE_NODES` nodes more than the job needs."""
    trials = Trials(stage, limit_s)
    acts: list[tuple[str, Callable[[int], float]]] = [("a loss with its echo", trials.echoed)]
    acts += [("two losses", trials.two_losses)]
    acts += [(f"second loss in {phase}", trials.second_in(phase)) for phase in PHASES]
    acts += [(f"move of {stage.slots} ranks", trials.move), ("a node", trials.nodes_lost(1))]
    acts += [(f"a rack of {RACK} nodes", trials.nodes_lost(RACK))]
    found = []
    for name, act in acts:
        found.append(trials.observe(name, act))
        time.sleep(5)  # a job trains between two faults
    return found
