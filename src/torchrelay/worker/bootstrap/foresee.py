"""Foresee: which layout a script will have, before it is launched. Each rank runs it alone, as far as protect().

    python -m torchrelay.worker.bootstrap.foresee NODES NPROC_PER_NODE (SCRIPT | -m MODULE) [ARGUMENT...]

One after the other, in a child each: torch is imported once. Groups and meshes are made with the fake backend, as a
replacement makes them. Prints a line of JSON for each rank; what the script prints is dropped, unless it fails.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from typing import IO, Any, NoReturn

import torch.distributed as dist

import torchrelay
from torchrelay.errors import RefusedError
from torchrelay.face import Options
from torchrelay.worker.bootstrap.wiring import replace_everywhere
from torchrelay.worker.peers import snapshots
from torchrelay.worker.process_groups import groups
from torchrelay.worker.source import script
from torchrelay.worker.state import layout
from torchrelay.worker.state.state import State

RANK_S = 120  # a rank may take as long to come to protect()
EVERY = ("alone", "replicated")  # steps between snapshots, if some rank's state has no replica, and if all have one
TAIL = 400  # letters of what a script that failed has printed


def main(arguments: list[str]) -> int:
    """Returns 0: all ranks came to protect(), 1: one did not."""
    nodes, per_node, argv = int(arguments[0]), int(arguments[1]), arguments[2:]
    for rank in range(nodes * per_node):
        told = ask(rank, nodes, per_node, argv)
        print(json.dumps({"rank": rank, "node": rank // per_node, **told}), flush=True)
        if "error" in told:
            return 1
    return 0


def ask(rank: int, nodes: int, per_node: int, argv: list[str]) -> dict[str, Any]:
    """What this rank comes to: {"shard", "alone", "replicated"}, or {"error"}."""
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as found:
        child = os.fork()
        if child == 0:
            become(rank, nodes, per_node, argv, said, found)
        _, status = os.waitpid(child, 0)
        found.seek(0)
        said.seek(0)
        answer = found.read()
        if answer:
            told: dict[str, Any] = json.loads(answer)
            return told
        tail = said.read().decode(errors="replace")[-TAIL:].strip()
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
        return {"error": f"rank {rank} did not come to protect() within {RANK_S} s\n{tail}"}
    return {"error": f"rank {rank} ended without protect()\n{tail}"}


def become(rank: int, nodes: int, per_node: int, argv: list[str], said: IO[bytes], found: IO[bytes]) -> NoReturn:
    """Run the script as this rank, in a child of its own; it ends in protect()."""
    signal.alarm(RANK_S)
    for stream in (1, 2):
        os.dup2(said.fileno(), stream)
    world, local = nodes * per_node, rank % per_node
    numbers = {
        "RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": per_node,
        "GROUP_RANK": rank // per_node, "GROUP_WORLD_SIZE": nodes, "ROLE_RANK": rank, "ROLE_WORLD_SIZE": world,
    }  # fmt: skip
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")

    def init(backend: str | None = None, *_: Any, timeout: Any = None, **__: Any) -> None:
        groups.init_replacement(backend, rank=rank, world_size=world, timeout=timeout)

    def protect(
        model: Any = None, optimizer: Any = None, state: Any = None, *, save: Any, load: Any, options: Options
    ) -> NoReturn:
        built = State(model, optimizer, state, save=save, load=load)
        every = {alone: snapshots.interval(options.snapshot_every, alone=alone == "alone") for alone in EVERY}
        kept = {"buddies": snapshots.buddies(options.snapshot_buddies)}
        end(found, {**layout_of(rank, world, options.shard, built), **every, **kept})

    replace_everywhere(dist.init_process_group, init)
    torchrelay._protect = protect
    try:
        script.run(argv)
    except RefusedError as error:
        end(found, {"error": f"refused: {error}"})
    except BaseException as error:  # noqa: BLE001  the top of the process: whatever it is, it must be told of
        end(found, {"error": f"rank {rank} ended before protect(): {type(error).__name__}: {error}"})
    os._exit(0)


def layout_of(rank: int, world: int, given: str | None, state: State) -> dict[str, Any]:
    refused = layout.refusal(state) or layout.blind(state, given)
    if refused is not None:
        raise RefusedError(*refused)
    return {"shard": layout.shard_name(state, rank, world) if given is None else given}


def end(found: IO[bytes], told: dict[str, Any]) -> NoReturn:
    """Leave the answer, and be gone, whatever the script has started."""
    found.write(json.dumps(told).encode())
    found.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
