"""Plain runs: a script's ranks without torchrelay, as under torchrun. What is promised is that a job equals them.

A process that has imported torch is kept for the whole test session, and forks them (`tests.support.warm`): a run takes
about a second.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WARM = Path(__file__).with_name("warm.py")
PORTS = range(20_000, 32_000)  # below those that the kernel gives away
LINGER_S = 10.0


@dataclass(frozen=True)
class Ended:
    """A plain run that is over."""

    codes: tuple[int | None, ...]  # by rank; None: it stood still, or another one had failed
    output: str

    @property
    def code(self) -> int | None:
        """That of the first rank that failed; None if nobody did and somebody stood still."""
        told = [code for code in self.codes if code is not None]
        bad = [code for code in told if code]
        return bad[0] if bad else 0 if len(told) == len(self.codes) else None


class Warm:
    """The process that forks ranks."""

    def __init__(self) -> None:
        # One thread a process, as in all jobs here: whoever adds up with more of them may get other bits.
        environment = {**without_ours(os.environ), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(WARM), str(os.getpid())],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def ask(self, request: Mapping[str, Any]) -> list[int | None]:
        """Have ranks forked, and wait for their ends. The codes of all."""
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None
        assert answers is not None
        asked.write(json.dumps(request) + "\n")
        asked.flush()
        answer = answers.readline()
        if not answer:
            raise RuntimeError(f"the process that forks plain ranks has ended: {self._process.wait(LINGER_S)}")
        codes: list[int | None] = json.loads(answer)["codes"]
        return codes

    def close(self) -> None:
        """End it, and whatever it has forked."""
        for end in (self._process.stdin, self._process.stdout):
            assert end is not None
            end.close()
        try:
            self._process.wait(LINGER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_warm: list[Warm] = []


def run_plain(
    script: Sequence[str], env: Mapping[str, str], out: Path, *, nodes: int = 1, per_node: int, timeout_s: float = 120
) -> Ended:
    """Run a script's ranks to their end. `env`: what they have of the environment; `out`: where their output goes."""
    port = str(free_port())
    common = {**without_ours(env), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    sizes = {"WORLD_SIZE": str(nodes * per_node), "LOCAL_WORLD_SIZE": str(per_node), "GROUP_WORLD_SIZE": str(nodes)}
    envs = [
        {**common, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank % per_node), "GROUP_RANK": str(rank // per_node)}
        for rank in range(nodes * per_node)
    ]
    request = {"argv": list(script), "cwd": os.getcwd(), "out": str(out), "envs": envs, "timeout_s": timeout_s}
    out.touch()
    if not _warm:
        _warm.append(Warm())
    try:
        codes = _warm[0].ask(request)
    except BaseException:  # whatever it is, the next run is not to read this one's answer
        end_warm()
        raise
    return Ended(tuple(codes), out.read_text())


@atexit.register
def end_warm() -> None:
    """The next run starts another one."""
    while _warm:
        _warm.pop().close()


def without_ours(env: Mapping[str, str]) -> dict[str, str]:
    """Ranks must not take themselves for workers, and nothing is told to who is not there."""
    return {name: value for name, value in env.items() if not name.startswith("TORCHRELAY_")}


def free_port() -> int:
    """One on which nobody listens, and which the kernel gives to nobody before rank 0 does."""
    chance = random.SystemRandom()
    while True:
        port = chance.choice(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
