"""How long `torchrelay status` takes, with 16 ranks: the target is 0.2 s.

A real orchestrator with two fake agents that beat; the command as an operator types it, as a process of its own; and in
the same run what Python itself takes to start (`pass`), and with what any client needs (`import json, http.client`).
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from statistics import median

from aiohttp import web

from figures import finish
from torchrelay.api.endpoint import JOURNAL, TOKEN, Endpoint, read_endpoint, write_endpoint
from torchrelay.orchestrator.core.service import Orchestrator
from torchrelay.orchestrator.doorway import url_of
from torchrelay.orchestrator.http.api import make_app
from torchrelay.orchestrator.http.door import Door, Strangers
from torchrelay.orchestrator.http.keys import Keys
from torchrelay.orchestrator.store.journal import Journal
from torchrelay.protocol.health.pulses import BEAT_MS, Beat, Sample
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import Generation, JobId, NodeId, Point, Rank, WorkerId, WorkerPhase
from torchrelay.protocol.succession.succession import VoterId
from torchrelay.wire.messages.channel import OrderFrame, ToAgent
from torchrelay.wire.trust.trust import new_token, write_token

RANKS, NODES, SPARES = 16, 2, 2
JOB = JobId("train")
DEADLINE_S = 30.0


class FakeAgent:
    """A node whose workers do at once what they are told."""

    def __init__(self, service: Orchestrator, number: int) -> None:
        self.service = service
        self.node = NodeId(f"node-{number}")
        self.incarnation = "bench"
        self.voter = VoterId("")
        self.workers: dict[str, Rank] = {}

    def send(self, message: ToAgent) -> None:
        for order in message.each() if isinstance(message, OrderFrame) else ():
            for event in self.answers(order):
                self.service.put(event)

    def close(self, reason: str) -> None:
        del reason

    def answers(self, order: od.Order) -> tuple[ev.Event, ...]:
        match order:
            case od.StartWorker(worker=worker, slot=slot):
                started = ev.WorkerStarted(worker=worker, node=self.node, slot=slot, pid=1 + slot, address="a")
                return started, ev.WorkerWarm(worker=worker)
            case od.Assign(job=job, generation=generation, worker=worker, rank=rank):
                self.workers[worker] = rank
                joined = ev.WorkerJoined(worker=worker, job=job, rank=rank)
                return joined, ev.WorkerReady(job=job, generation=generation, worker=worker, rank=rank, point=None)
            case od.Reconfigure(job=job, generation=generation, worker=worker, rank=rank):
                return (ev.WorkerReconfigured(job=job, generation=generation, worker=worker, rank=rank),)
            case od.Resume(job=job, generation=generation, worker=worker, rank=rank):
                return (ev.WorkerResumed(job=job, generation=generation, worker=worker, rank=rank),)
        return ()

    def beat(self, step: int) -> Beat:
        samples = tuple(
            Sample(
                worker=WorkerId(worker),
                rank=rank,
                generation=Generation(1),
                point=Point(step),
                phase=WorkerPhase.COMPUTING,
                phase_ms=3,
                step_ms=12.5,
                collectives=step,
                beat_ms=1,
                process="R",
                cpu_ms=100,
            )
            for worker, rank in self.workers.items()
        )
        return Beat(node=self.node, incarnation=self.incarnation, samples=samples)


async def serve(run_dir: Path) -> None:
    """An orchestrator whose job trains, until it is killed."""
    token = new_token()
    write_token(run_dir / TOKEN, token)
    with closing(Journal(run_dir / JOURNAL)) as journal:
        service = Orchestrator(journal)
        strangers = Strangers()
        runner = web.AppRunner(make_app(service, Keys.of_one(token), strangers), access_log=None)
        await runner.setup()
        assert runner.server is not None
        url = url_of("127.0.0.1", await Door(runner.server, strangers).open("127.0.0.1", 0), tls=False)
        serving = asyncio.create_task(service.serve())
        agents = [FakeAgent(service, number) for number in range(NODES)]
        slots = (RANKS + SPARES) // NODES
        for agent in agents:
            await service.attach(agent, ev.NodeJoined(node=agent.node, incarnation="bench", slots=slots))
        spec = ev.JobSpec(job=JOB, world_size=RANKS, nproc_per_node=RANKS // NODES, nodes=NODES, spares=SPARES)
        await service.put(ev.JobSubmitted(spec=spec))
        step = 0
        while not serving.done():
            step += 1
            for agent in agents:
                service.beat(agent, agent.beat(step))
            if service.cluster.jobs[JOB].phase == "running":
                write_endpoint(run_dir, Endpoint(url=url, pid=1))
            await asyncio.sleep(BEAT_MS / 1000)


def timed(words: list[str]) -> float:
    """How long a command takes, in ms."""
    begun = time.perf_counter()
    subprocess.run(words, check=True, capture_output=True, timeout=DEADLINE_S)
    return (time.perf_counter() - begun) * 1000


def measure(runs: int) -> dict[str, float]:
    """The medians; the three commands take turns, so that all see the same machine."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        server = subprocess.Popen([sys.executable, __file__, "--serve", folder])
        try:
            until = time.monotonic() + DEADLINE_S
            while read_endpoint(run_dir) is None:
                assert server.poll() is None, "the orchestrator has ended"
                assert time.monotonic() < until, "the job does not train in time"
                time.sleep(0.05)
            commands = {
                "status_ms": ["-m", "torchrelay.cli.main", "status", "--run-dir", folder],
                "python_pass_ms": ["-c", "pass"],
                "python_client_ms": ["-c", "import json, http.client"],
            }
            times: dict[str, list[float]] = {name: [] for name in commands}
            for _ in range(runs):
                for name, words in commands.items():
                    times[name].append(timed([sys.executable, *words]))
        finally:
            server.kill()
            server.wait()
    return {name: median(spans) for name, spans in times.items()} | {"ranks": RANKS, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        asyncio.run(serve(options.serve))
    else:
        finish("status", measure(options.runs))


if __name__ == "__main__":
    main()
