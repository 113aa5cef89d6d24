"""A process that has imported torch, and forks the ranks of plain runs: without torchrelay, as under torchrun.

It is started by `tests.support.plain`, once per test session, and reads requests from its standard input, a line of
JSON each:
{"argv", "cwd", "out", "envs": one per rank, "timeout_s"}. It answers each with {"codes": [...]}, in the order of the
ranks; a code is null where a rank had not ended in time. It imports nothing of ours: the ranks shall be plain PyTorch.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

PRELOAD = (
    "torch", "torch.distributed", "torch.nn.parallel", "torch.optim", "torch.utils.data", "torch._dynamo", "numpy",
    "numpy.random",
)  # fmt: skip
PR_SET_PDEATHSIG = 1
TICK_S = 0.02


class Orphaned(Exception):
    """Who asks has gone."""


def die_with_parent(parent: int) -> None:
    """Nothing of a run stays behind, whatever ends the tests."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def serve(requests: TextIO, answers: TextIO) -> tuple[dict[str, Any], int] | None:
    """Serve until there are no more requests: None. In a forked child: the request, and which rank it is of it."""
    for line in requests:
        request = json.loads(line)
        pids: list[int] = []
        server = os.getpid()
        for rank in range(len(request["envs"])):
            pid = os.fork()
            if pid == 0:
                die_with_parent(server)
                return request, rank
            pids.append(pid)
        codes = wait(pids, request["timeout_s"], requests)
        answers.write(json.dumps({"codes": codes}) + "\n")
        answers.flush()
    return None


def wait(pids: Sequence[int], timeout_s: float, requests: TextIO) -> list[int | None]:
    """Wait for the ends of all. If one fails, or time is over, the others are killed: they would wait for ever."""
    codes: dict[int, int | None] = {}
    until = time.monotonic() + timeout_s
    while len(codes) < len(pids):
        for pid in set(pids) - codes.keys():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        over = time.monotonic() > until
        if over or any(codes.values()):
            for pid in set(pids) - codes.keys():
                os.killpg(pid, signal.SIGKILL) if os.getpgid(pid) == pid else os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[pid] = None
        # Nobody sends a second request before the answer: what is to be read here is the end of who asks.
        elif len(codes) < len(pids) and select.select([requests], [], [], TICK_S)[0]:
            raise Orphaned
    return [codes[pid] for pid in pids]


def settle(request: dict[str, Any], rank: int) -> None:
    """In the child: session, output, environment, folder, path and argv, as if it had been started by itself."""
    os.setsid()
    output = os.open(request["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for descriptor, standard in ((null, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, standard)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream = io.TextIOWrapper(io.FileIO(descriptor, "w", closefd=False), line_buffering=True, write_through=True)
        vars(sys)[name] = vars(sys)[f"__{name}__"] = stream
    server_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(request["envs"][rank])
    os.chdir(request["cwd"])
    sys.argv = list(request["argv"])
    ours = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    others = [path for path in sys.path[1:] if path not in server_path]
    sys.path[:] = [os.path.dirname(os.path.abspath(sys.argv[0])), *ours, *others]
    # Whoever destroys the default group and then frees its model stood still there for ever, once in twenty runs on a
    # busy machine, in torch's own code: groups live as long as the process.
    sys.modules["torch.distributed"].destroy_process_group = lambda *_: None  # type: ignore[attr-defined]
    sys.modules["numpy.random"].seed()  # a new process has entropy of its own; `random` sees to that by itself


def main() -> None:
    """Serve; in a child, run the script. It ends as any Python process does."""
    die_with_parent(int(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    gc.disable()
    for name in PRELOAD:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    try:
        child = serve(sys.stdin, answers)
    except Orphaned:
        return
    if child is not None:
        settle(*child)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
