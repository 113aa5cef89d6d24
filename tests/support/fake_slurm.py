"""A fake of Slurm's commands: a program that keeps its state in a file, and that fails in each way when told to.

`FakeSlurm(folder)` puts small executables into `folder/bin`. They run this file without any package, which
takes some ten milliseconds. What it prints is in the shapes of real Slurm: text as of 22.05, JSON as of 23.02.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

COMMANDS = ("scontrol", "squeue", "salloc", "scancel", "sacctmgr")
HOSTLISTS = Path(__file__).parents[2] / "src/torchrelay/schedulers/slurm/hostlists.py"
State = dict[str, Any]
OVER = ("CANCELLED", "COMPLETED", "PREEMPTED")


class FakeSlurm:
    """A cluster of nodes n1, n2, ..., with a main job on the first of them. `environ` leads Slurm's commands here."""

    def __init__(
        self, folder: Path, *, nodes: int = 5, main_nodes: int = 2, version: str = "22.05.8", operator: bool = True
    ) -> None:
        self.folder, self.bin, self.path = folder, folder / "bin", folder / "state.json"
        self.bin.mkdir(parents=True, exist_ok=True)
        names = [f"n{place}" for place in range(1, nodes + 1)]
        main = {"name": "gpt", "state": "RUNNING", "nodes": names[:main_nodes], "comment": "", "partition": "train",
                "singleton": False, "end": None, "preempt": None, "batch": "n1", "steps": []}  # fmt: skip
        self.path.write_text(
            json.dumps(
                {
                    "version": version,
                    "operator": operator,
                    "nodes": {name: {"flags": [], "reason": ""} for name in names},
                    "jobs": {"1": main},
                    "next": 2,
                    "faults": {},
                    "calls": [],
                    "doubles": 0,
                    "config": {},
                    "reservations": [],
                    "low": "REQUEUE",
                    "grace": 120,  # GraceTime of low
                }
            )
        )
        for name in COMMANDS:
            self.restore(name)
        self.environ = {**os.environ, "PATH": str(self.bin)}

    def restore(self, name: str) -> None:
        """Put a command in place."""
        path = self.bin / name
        path.write_text(
            f"#!{sys.executable} -IS\nimport sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
            f"import fake_slurm\nsys.exit(fake_slurm.main({name!r}, sys.argv[1:], {str(self.path)!r}))\n"
        )
        path.chmod(0o755)

    def remove(self, name: str) -> None:
        (self.bin / name).unlink()

    @contextmanager
    def changed(self) -> Iterator[State]:
        """The state, to be changed."""
        with opened(self.path) as state:
            yield state

    @staticmethod
    def changed_in(folder: Path) -> AbstractContextManager[State]:
        """The state of the fake in a folder."""
        return opened(folder / "state.json")

    def fail(self, command: str, how: str) -> None:
        """From now on: hang, refuse, empty, garbage, half, huge, lost, late; empty: well again."""
        with self.changed() as state:
            state["faults"][command] = how

    def state(self) -> State:
        with opened(self.path) as state:
            return state

    def running(self, name: str = "+spare.") -> list[str]:
        """Names of running jobs that contain this."""
        jobs = self.state()["jobs"].values()
        return [job["name"] for job in jobs if name in job["name"] and job["state"] == "RUNNING"]

    def alive(self) -> list[str]:
        """Names of satellites that run or wait."""
        jobs = self.state()["jobs"].values()
        return [job["name"] for job in jobs if "+spare." in job["name"] and job["state"] not in OVER]


@contextmanager
def opened(path: Path) -> Iterator[State]:
    """The state under a lock; written back."""
    with path.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        state: State = json.load(file)
        yield state
        file.seek(0)
        file.truncate()
        json.dump(state, file)


# ---------------------------------------------------------------- the program


def hostlists() -> Any:
    spec = importlib.util.spec_from_file_location("hostlists", HOSTLISTS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(command: str, words: list[str], state_path: str) -> int:
    """Run one of the commands. Returns its exit code."""
    path = Path(state_path)
    with opened(path) as state:
        fault = state["faults"].get(command, "")
        state["calls"].append([command, *words])
    if fault in ("hang", "refuse", "empty", "garbage", "half", "huge"):
        return fail(fault, command, words, path)
    return int(CALLS[command](words, path, fault))


def fail(fault: str, command: str, words: list[str], path: Path) -> int:
    """One of the ways in which a command fails."""
    if fault == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(f"{command}: error: slurm_receive_msg: waiting", file=sys.stderr, flush=True)
        time.sleep(60)
    if fault == "refuse":
        print(f"{command}: error: Unable to contact slurm controller (connect failure)", file=sys.stderr)
        return 1
    if fault == "garbage":
        print("\x1b[31m%PDF-1.4 \x00 <html>what?</html>")
    if fault == "half":
        with opened(path) as state:
            text = show(words, state) if command == "scontrol" else rows(state, [])
        print(text[: len(text) // 2], end="")
    if fault == "huge":
        for _ in range(400):
            sys.stdout.write("NodeName=x State=IDLE " * 500 + "\n")
    return 0


def options(words: list[str]) -> dict[str, str]:
    """`--name=value` and `--flag`."""
    return {word[2:].partition("=")[0]: word.partition("=")[2] for word in words if word.startswith("--")}


def holder(state: State, node: str) -> dict[str, Any] | None:
    return next((job for job in state["jobs"].values() if job["state"] == "RUNNING" and node in job["nodes"]), None)


def schedule(state: State) -> None:
    """Start what can be started, oldest first; a singleton waits for all of its name that came before."""
    for number, job in sorted(state["jobs"].items(), key=lambda item: int(item[0])):
        if job["state"] != "PENDING":
            continue
        earlier = [
            other
            for name, other in state["jobs"].items()
            if int(name) < int(number) and other["name"] == job["name"] and other["state"] not in OVER
        ]
        if job["singleton"] and earlier:
            continue
        free = [node for node in candidates(state, job) if holder(state, node) is None]
        taken = [node for node in candidates(state, job) if (who := holder(state, node)) and who["partition"] == "low"]
        if len(free) < job["count"] and state["low"] != "OFF" and len(free) + len(taken) >= job["count"]:
            for node in taken[: job["count"] - len(free)]:
                victim = holder(state, node)
                if victim is not None:
                    victim["state"] = "PREEMPTED"
                free.append(node)
        if len(free) >= job["count"]:
            job["nodes"], job["state"] = free[: job["count"]], "RUNNING"
            same = [other for other in state["jobs"].values() if other["name"] == job["name"]]
            state["doubles"] += sum(other["state"] == "RUNNING" for other in same) - 1


def candidates(state: State, job: dict[str, Any]) -> list[str]:
    well = [name for name, node in state["nodes"].items() if not node["flags"] and name not in job["exclude"]]
    return [name for name in well if not job["only"] or name in job["only"]]


def salloc(words: list[str], path: Path, fault: str) -> int:
    """Ask for nodes. `lost`: given, and no answer comes; `late`: the request arrives when the gate is opened."""
    given, lists = options(words), hostlists()
    if fault:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as if it had been killed after its request left
    until = time.monotonic() + float(given.get("immediate", "60"))
    if fault == "late":
        with opened(path) as state:
            state["at_gate"] = True
        while not path.with_name("gate").exists():
            time.sleep(0.01)
    with opened(path) as state:
        count, number = int(given.get("nodes", "1")), str(state["next"])
        if count > len(state["nodes"]):
            print(
                "salloc: error: Job submit/allocate failed: Requested node configuration is not available",
                file=sys.stderr,
            )
            return 1
        state["next"] += 1
        state["jobs"][number] = {
            "name": given["job-name"], "state": "PENDING", "nodes": [], "comment": given.get("comment", ""),
            "partition": given["partition"], "singleton": given.get("dependency") == "singleton", "count": count,
            "exclude": lists.expand(given.get("exclude", "")), "only": lists.expand(given.get("nodelist", "")),
            "end": None, "preempt": None, "batch": "", "steps": [],
        }  # fmt: skip
        schedule(state)
    if fault == "lost":
        time.sleep(60)
    while True:
        with opened(path) as state:
            now = state["jobs"][number]["state"]
            if now == "RUNNING" or now in OVER or time.monotonic() > until:
                if now == "PENDING":
                    state["jobs"][number]["state"] = "CANCELLED"
                break
        time.sleep(0.02)
    if now != "RUNNING":
        print("salloc: error: Unable to allocate resources: Connection timed out", file=sys.stderr)
    return int(now != "RUNNING")


def stamp(at: float | None) -> str:
    return "NONE" if at is None else time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))


def rows(state: State, words: list[str]) -> str:
    """What squeue prints."""
    given, lines = options(words), list[str]()
    asked = given["jobs"].split(",") if "jobs" in given else None
    for number, job in state["jobs"].items():
        if job["state"] in OVER or (asked is not None and number not in asked):
            continue
        if "steps" in given:
            lines += [f"{number}.{step}" for step in ("extern", *job["steps"])]
        elif "Format" in given:
            lines.append(f"{number:<20}{stamp(job['preempt']).replace('NONE', 'N/A'):<20}")
        else:
            held = hostlists().compress(job["nodes"])
            parts = [number, job["state"], job["partition"], stamp(job["end"]), "None", held, job["name"]]
            lines.append("|".join([*parts, job["comment"] or "(null)"]))
    return "".join(f"{line}\n" for line in lines)


def squeue(words: list[str], path: Path, _: str) -> int:
    with opened(path) as state:
        print(rows(state, words), end="")
    return 0


def scancel(words: list[str], path: Path, _: str) -> int:
    """By id, or by name."""
    name = options(words).get("name")
    with opened(path) as state:
        for number, job in state["jobs"].items():
            if (number in words or job["name"] == name) and job["state"] not in OVER:
                job["state"] = "CANCELLED"
        schedule(state)
    return 0


def sacctmgr(_words: list[str], path: Path, _: str) -> int:
    with opened(path) as state:
        print("Operator" if state["operator"] else "None")
    return 0


# ---------------------------------------------------------------- scontrol


def scontrol(words: list[str], path: Path, _: str) -> int:
    """show, update, write."""
    with opened(path) as state:
        if "update" in words:
            return update(dict(word.split("=", 1) for word in words if "=" in word), state)
        if "write" in words:
            print("#!/bin/sh\n#SBATCH --nodes=2 --no-kill\nsrun --no-kill train")
            return 0
        if "--json" in words and state["version"].startswith("22."):
            print("scontrol: unrecognized option '--json'", file=sys.stderr)
            return 1
        text = show(words, state)
        if text:
            print(text, end="")
            return 0
    print("slurm_load_jobs error: Invalid job id specified", file=sys.stderr)
    return 1


def update(given: dict[str, str], state: State) -> int:
    if "NodeName" in given:
        if not state["operator"]:
            print("slurm_update error: Invalid user id", file=sys.stderr)
            return 1
        node = state["nodes"][given["NodeName"]]
        node["flags"], node["reason"] = (["DRAIN"], given["Reason"]) if given["State"] == "DRAIN" else ([], "")
        return 0
    job = state["jobs"].get(given["JobId"])
    if job is None or job["state"] in OVER:
        print(f"Invalid job id specified for job {given['JobId']}", file=sys.stderr)
        return 1
    if "Comment" in given:
        job["comment"] = given["Comment"]
        return 0
    keep = hostlists().expand(given["NodeList"])
    if "disable_job_shrink" in state.get("refuses", ""):
        print(f"Requested operation not supported on this system for job {given['JobId']}", file=sys.stderr)
        return 1
    if job["batch"] not in keep or not set(keep) <= set(job["nodes"]):
        print(f"Invalid node name specified for job {given['JobId']}", file=sys.stderr)
        return 1
    job["nodes"] = list(keep)
    return 0


def show(words: list[str], state: State) -> str:
    """What `scontrol show` prints; empty for a job that is not known."""
    kinds = ("config", "partition", "nodes", "job", "reservation")
    kind = next(word for word in words if word in kinds)
    number = words[words.index("job") + 1] if kind == "job" else ""
    if kind == "job" and number not in state["jobs"]:
        return ""
    if "--json" in words:
        return json.dumps(as_json(kind, number, state), indent=1)
    if kind == "job":
        return job_text(number, state)
    return {"config": config, "partition": partitions, "nodes": nodes, "reservation": reservations}[kind](state)


def config(state: State) -> str:
    settings = {
        "AccountingStorageType": "accounting_storage/slurmdbd", "KillWait": "30 sec", "PreemptMode": "REQUEUE",
        "PreemptType": "preempt/partition_prio", "SchedulerParameters": "(null)", "SlurmctldParameters": "(null)",
        "SlurmUser": "slurm(64030)", "SLURM_VERSION": state["version"], **state["config"],
    }  # fmt: skip
    head = "Configuration data as of 2026-11-29T08:25:03\n"
    return head + "".join(f"{key:<23} = {value}\n" for key, value in settings.items())


def partitions(state: State) -> str:
    listed = hostlists().compress(state["nodes"])
    rest = f"Hidden=NO MaxTime=UNLIMITED Nodes={listed} PriorityJobFactor=1"
    return (
        f"PartitionName=train AllowGroups=ALL Default=YES GraceTime=0 {rest} PriorityTier=100 "
        "PreemptMode=OFF State=UP\n"
        f"PartitionName=low AllowGroups=ALL Default=NO GraceTime={state['grace']} {rest} PriorityTier=1 "
        f"PreemptMode={state['low']} State=UP\n"
    )


def words_of_node(name: str, node: dict[str, Any], state: State) -> list[str]:
    base = [] if "DOWN" in node["flags"] else ["ALLOCATED" if holder(state, name) else "IDLE"]
    return [*base, *node["flags"]]


def nodes(state: State) -> str:
    lines = []
    for name, node in state["nodes"].items():
        told = "+".join(words_of_node(name, node, state))
        reason = f" Reason={node['reason']} [root@2026-11-29T08:25:41]" if node["reason"] else ""
        lines.append(
            f"NodeName={name} Arch=x86_64 CoresPerSocket=4  CPUAlloc=0 Gres=gpu:2 NodeAddr=127.0.0.1 "
            f"OS=Linux 6.18.44 #1 SMP PREEMPT_DYNAMIC @0  State={told} Weight=1 Partitions=train,low  "
            f"CfgTRES=cpu=4,mem=1000M AllocTRES= ExtSensorsTemp=n/s{reason}\n"
        )
    return "".join(lines)


def reservations(state: State) -> str:
    if not state["reservations"]:
        return "No reservations in the system\n"
    return "".join(
        f"ReservationName={each['name']} StartTime={stamp(each['start'])} Duration=01:00:00 Nodes={each['nodes']} "
        f"NodeCnt=1 Flags={each['flags']},SPEC_NODES TRES=cpu=4 Users=root State=INACTIVE\n"
        for each in state["reservations"]
    )


def job_text(number: str, state: State) -> str:
    job = state["jobs"][number]
    preempt = f"PreemptTime={stamp(job['preempt'])} " if job["preempt"] else ""
    end = stamp(job["end"]).replace("NONE", "Unknown")
    return (
        f"JobId={number} JobName={job['name']} UserId=root(0) Account=(null) QOS=(null) JobState={job['state']} "
        f"Reason=None TimeLimit=UNLIMITED EndTime={end} {preempt}Partition={job['partition']} "
        f"NodeList={hostlists().compress(job['nodes'])} BatchHost={job['batch']} "
        f"NumNodes={len(job['nodes'])} NumCPUs=8 "
        f"MinMemoryNode=0 Features=(null) OverSubscribe=OK TresPerNode=gres:gpu:2 \n"
    )


def number_of(value: float | None) -> dict[str, Any]:
    return {"set": value is not None, "infinite": False, "number": value or 0}


def as_json(kind: str, number: str, state: State) -> dict[str, Any]:
    """The shapes of 24.11 and 26.05: numbers in three parts, states as lists."""
    if kind == "nodes":
        found = [
            {
                "name": name,
                "state": words_of_node(name, node, state),
                "reason": node["reason"],
                "gres": "gpu:2",
                "partitions": ["train", "low"],
                "cpus": 4,
                "free_mem": number_of(15918),
                "extra": "State=DOWN",
            }
            for name, node in state["nodes"].items()
        ]
        return {"nodes": found, "last_update": number_of(1795940703), "meta": {}, "errors": [], "warnings": []}
    if kind == "partition":
        listed = hostlists().compress(state["nodes"])
        rows = [("train", 100, ["OFF"]), ("low", 1, [state["low"]])]
        return {
            "partitions": [
                {
                    "name": name,
                    "priority": {"job_factor": 1, "tier": tier},
                    "preempt_mode": mode,
                    "grace_time": state["grace"] if name == "low" else 0,
                    "nodes": {"configured": listed, "total": len(state["nodes"])},
                    "partition": {"state": ["UP"]},
                }
                for name, tier, mode in rows
            ]
        }
    job = state["jobs"][number]
    one = {
        "job_id": int(number), "name": job["name"], "job_state": [job["state"]], "comment": job["comment"],
        "nodes": hostlists().compress(job["nodes"]), "batch_host": job["batch"], "partition": job["partition"],
        "end_time": number_of(job["end"]), "preempt_time": number_of(job["preempt"]), "cpus": number_of(8),
        "node_count": number_of(len(job["nodes"])), "memory_per_node": number_of(None), "shared": [],
        "tres_per_node": "gres/gpu:2", "account": "", "qos": "", "features": "", "submit_line": "sbatch --no-kill x.sh",
    }  # fmt: skip
    return {"jobs": [one]}


CALLS = {"scontrol": scontrol, "squeue": squeue, "salloc": salloc, "scancel": scancel, "sacctmgr": sacctmgr}
