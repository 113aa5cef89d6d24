"""Launch: what is to be run on every node, as `torchrelay run` writes it to `RUN_DIR/job.json` for the agents."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from msgspec import Struct

from torchrelay.wire.files.owned import Foreign, read_owned

FILE = "job.json"
MOST = 64 << 20  # bytes that are read of it

# What a training process needs anyway and what is slow to import: loaded once, in the forkserver.
PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
    "torch._dynamo",  # else the first optimizer of each process imports it, for 0.7 s
    "numpy",
    "torchrelay.worker.bootstrap.main",
)
ENCRYPTING = ("torchrelay.wire.trust.authority",)  # the same for runs whose workers encrypt
FUNCTION = "torchrelay.worker.bootstrap.main:run_worker"
# Printed by rank 0 of a script that steps without protect(); `torchrelay run` adds what would protect it.
UNPROTECTED = "torchrelay: this script takes a step without protect(): it runs unprotected"


class PathLimits(Struct, frozen=True, kw_only=True):
    """When agents (of runs with --net-failover or --ib-failover) find a network path at fault, and when that is over.

    A path is at fault if it was lost for `down_s`, or `flaps` times within `window_s`, or has carried less than
    `slow_share` of its usual for `slow_s`; it is well again when it has been whole for `heal_s`. Where nobody uses it
    any more, the agent tries to connect to `probe_port` of a peer: any answer will do, a refusal too.
    """

    down_s: float = 30.0
    flaps: int = 8
    window_s: float = 3600.0
    slow_share: float = 0.5
    slow_s: float = 60.0
    heal_s: float = 60.0
    probe_port: int = 9  # "discard": nobody listens there
    ports: bool = False  # InfiniBand and RoCE ports are watched, too: of a run with --ib-failover


class Launch(Struct, frozen=True, kw_only=True):
    """One job's command. The agents hand it to their workers: as argv, working folder and environment."""

    script: str  # a path, or a module's name if `module`
    args: tuple[str, ...] = ()
    module: bool = False
    cwd: str
    env: dict[str, str] = {}  # the operator's environment, which the workers inherit; no secrets of ours
    nproc_per_node: int = 1
    job: str = ""  # its name; the agents' folders on other machines have it
    inherit: bool = True  # False: agents are on other machines, and `env` comes on top of what they find there
    encrypts: bool = False  # what goes from worker to worker goes over TLS, as all of them are told by their agents
    code: str = ""  # the folder in which the run keeps its code: see `kept`; none if empty
    master_addr: str = "127.0.0.1"
    master_port: int = 29500
    preload: tuple[str, ...] = PRELOAD
    function: str = FUNCTION  # what a worker runs, "module:function"; it takes no arguments
    parks: bool = False  # it may be written down, and so must outlive the word of a scheduler that it is to go
    paths: PathLimits | None = None  # of a run with --net-failover or --ib-failover: agents watch its network paths

    @property
    def argv(self) -> tuple[str, ...]:
        """What `sys.argv` holds when the worker's function is called: ("-m", module, ...) or (script, ...)."""
        return (("-m", self.script) if self.module else (self.script,)) + self.args


def write_launch(run_dir: Path, launch: Launch) -> Path:
    """Write `RUN_DIR/job.json`, whole or not at all; readable by its owner only, as environments may hold tokens."""
    path = run_dir / FILE
    draft = path.with_suffix(".draft")
    draft.touch(mode=0o600)
    draft.write_bytes(msgspec.json.encode(launch))
    draft.replace(path)
    return path


def forget_environment(run_dir: Path) -> None:
    """The run is over: the operator's environment, in which there may be keys, is not kept. Raises OSError."""
    path = run_dir / FILE
    began = path.stat().st_mtime_ns  # which run is the newest is told by it
    try:
        write_launch(run_dir, msgspec.structs.replace(read_launch(run_dir), env={}))
    except (OSError, ValueError):  # the disk is full, say
        os.truncate(path, 0)
    os.utime(path, ns=(began, began))


def read_launch(run_dir: Path) -> Launch:
    """Read it back. Raises `ValueError`, naming the file, if it is not there or not one."""
    path = run_dir / FILE
    try:
        return msgspec.json.decode(read_owned(path, MOST).text, type=Launch)
    except Foreign as error:
        raise ValueError(f"{path} is not trusted: {error}. Look who may write to {run_dir}") from error
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"{path} is not a job's launch file: {error}. `torchrelay run` writes it.") from error
