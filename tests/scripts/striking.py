"""Strikes from within a move: the process that sees a phase of it from the inside is the one that strikes, just there.

The test's driver writes FOLDER/cell.json: {"id", "who", "when", "how", "witness", "rank", "pids", "nodes", "run_dir"}.
Hooks stand where a phase begins in the target, the source and the others. The witness strikes once: it kills or stops
itself or another process by its id; or it asks the driver for something, and stays where it is until that is done.
"""

import json
import os
import signal
import time
from pathlib import Path

ASKED_S = 30.0  # how long the witness waits for the driver
DRIVER = ("second", "untaint", "freeze")  # what only the driver can do


class Striker:
    """What this worker is in the move that the driver is about, and what it does at a place."""

    def __init__(self, folder, rank):
        self.folder, self.rank = Path(folder), rank
        self.stamp, self.kept = 0, None

    def cell(self):
        """What the driver has written last; None if nothing is to be struck."""
        try:
            stamp = os.stat(self.folder / "cell.json").st_mtime_ns
        except FileNotFoundError:
            return None
        if stamp != self.stamp:
            self.kept, self.stamp = json.loads((self.folder / "cell.json").read_text()), stamp
        return self.kept

    def role(self, cell):
        """The bystander is a certain one; who has the source's rank and is not it is a target."""
        for role in ("source", "bystander"):
            if cell["pids"][role] == os.getpid():
                return role
        return "target" if self.rank == cell["rank"] else "another"

    def here(self, phase):
        """This worker is at the beginning of a phase."""
        cell = self.cell()
        if cell is None:
            return
        role = self.role(cell)
        if phase == "joining" and role == "target":
            told = {"pid": os.getpid(), "node": os.environ["TORCHRELAY_NODE"]}
            write(self.folder / f"{cell['id']}.target", told)
        if phase != cell["when"] or role != cell["witness"]:
            return
        try:
            with (self.folder / f"{cell['id']}.struck").open("x") as mark:
                mark.write(f"{role} {os.getpid()}\n")
        except FileExistsError:
            return
        self.strike(cell, role)

    def strike(self, cell, role):
        who = cell["who"]
        if who in DRIVER:
            answered = self.folder / f"{cell['id']}.done"
            until = time.monotonic() + ASKED_S
            while not answered.exists() and time.monotonic() < until:
                time.sleep(0.002)
        elif who == role:
            os.kill(os.getpid(), how(cell))
        else:
            pid = self.victim(cell)
            os.kill(pid, how(cell))
            if who == "orchestrator":
                await_end(pid)  # what follows is told to nobody

    def victim(self, cell):
        """The process id of somebody else."""
        who, run_dir = cell["who"], Path(cell["run_dir"])
        if who in ("source", "bystander"):
            return cell["pids"][who]
        if who == "orchestrator":
            return json.loads((run_dir / "endpoint.json").read_text())["pid"]
        target = json.loads((self.folder / f"{cell['id']}.target").read_text())
        if who == "target":
            return target["pid"]
        node = target["node"] if who == "target's agent" else cell["nodes"]["source"]
        listed = json.loads((run_dir / "nodes.json").read_text())["nodes"]
        return next(one["agent_pid"] for one in listed if one["node"] == node)


def how(cell):
    return signal.SIGSTOP if cell["how"] == "stop" else signal.SIGKILL


def write(path, value):
    """Whole or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(value))
    draft.replace(path)


def await_end(pid):
    until = time.monotonic() + 5.0
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except (FileNotFoundError, ProcessLookupError):
            return
        time.sleep(0.001)


def place_hooks(striker):
    """Each phase of a move, where it begins in our own library; in "joining" the script itself is."""
    from torchrelay.protocol.messages.orders import Decide
    from torchrelay.worker.control.position import Position
    from torchrelay.worker.process_groups import groups
    from torchrelay.worker.replacement import taking_over
    from torchrelay.worker.step.calls import Calls
    from torchrelay.worker.step.safepoint import Safepoint
    from torchrelay.worker.transfer import transfer

    def hook(owner, name, phase, holds=lambda *_: True):
        function = getattr(owner, name)

        def hooked(*args, **kwargs):
            if holds(*args):
                striker.here(phase)
            return function(*args, **kwargs)

        setattr(owner, name, hooked)

    hook(Calls, "before_update", "rehearsing", lambda calls, *_: calls._session.rehearsing)
    hook(Position, "halt", "halt heard", lambda position, *_: position.committed is not None)
    hook(
        Safepoint,
        "_become_ready",
        "standing",
        lambda safepoint, order: isinstance(order, Decide) and safepoint._position.halted == order.generation,
    )
    hook(taking_over, "decode_record", "catching up")
    hook(groups, "reconfigure", "reconfigure")
    hook(transfer, "fetch_state", "restore")
    hook(Safepoint, "_say_resumed", "resume")
