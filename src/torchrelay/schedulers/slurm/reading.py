"""Reading: what Slurm's commands print, as values: `scontrol ... -o` of 22.05, `--json` of 23.02 and later. Pure.

The JSON changes from version to version: numbers become `{set, infinite, number}`, states become lists, keys come and
go. So everything is read by key, and what is absent is unknown. Times are seconds since 1970; text is in UTC.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct

from torchrelay.schedulers.slurm.hostlists import expand

Version = tuple[int, int, int]
NOTHING = frozenset({"", "(null)", "N/A", "n/a", "NONE", "None", "Unknown", "UNLIMITED", "INFINITE", "NOT_SET"})
# Signs behind a node's state in the short form, in Slurm's own words for the long one.
SIGNS = {
    "*": "NOT_RESPONDING", "~": "POWERED_DOWN", "#": "POWERING_UP", "!": "POWER_DOWN", "%": "POWERING_DOWN",
    "$": "MAINTENANCE", "@": "REBOOT_REQUESTED", "^": "REBOOT_ISSUED", "-": "PLANNED",
}  # fmt: skip
_KEY = re.compile(r"(?:^|\s)([A-Za-z][\w:/]*)=")
_REASON = re.compile(r"\sReason=(.*?)(?:\s\[[^\s\[\]]*@[^\]]*\]|$)")
_GPUS = re.compile(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)")
_WORD = re.compile(r"[A-Za-z_]+")


class Unreadable(ValueError):
    """What a command printed is not what it should be; says what is wrong with it."""


class NodeRecord(Struct, frozen=True, kw_only=True):
    """A node: its states in capitals (IDLE, DRAIN, NOT_RESPONDING, ...), the operator's reason, what it has."""

    name: str
    states: frozenset[str]
    reason: str = ""
    gpus: int = 0
    partitions: tuple[str, ...] = ()


class JobRow(Struct, frozen=True, kw_only=True):
    """A job in the queue, as `squeue` lists it. `end_at`: when its time limit ends it; None: never, or unknown."""

    job: int
    state: str
    name: str
    nodes: tuple[str, ...] = ()
    partition: str = ""
    end_at: float | None = None
    reason: str = ""
    comment: str = ""


class JobRecord(Struct, frozen=True, kw_only=True):
    """What only `scontrol show job` tells of a job. `asked`: its own words for what it asked for, by Slurm's key."""

    job: int
    name: str
    state: str
    nodes: tuple[str, ...]
    batch_host: str = ""
    partition: str = ""
    end_at: float | None = None
    preempt_at: float | None = None
    asked: dict[str, str]


class Partition(Struct, frozen=True, kw_only=True):
    """A partition: who yields to whom (`tier`, `preempt_mode`), and for how long a job may go on after the notice."""

    name: str
    tier: int
    preempt_mode: str
    nodes: frozenset[str] = frozenset()
    grace_s: int = 0
    is_up: bool = True


class Reservation(Struct, frozen=True, kw_only=True):
    """Nodes that are reserved from some time on."""

    name: str
    start_at: float | None
    flags: frozenset[str]
    nodes: frozenset[str]


# ---------------------------------------------------------------- pieces


def number(value: object) -> float | None:
    """A number in any of its forms; None if it is not set, infinite, or none at all."""
    if isinstance(value, dict):
        usable = value.get("set", True) and not value.get("infinite", False)
        return number(value.get("number")) if usable else None
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?", value.strip()):
        return float(value)
    return None


def words(value: object) -> tuple[str, ...]:
    """A list of words in any of its forms: a list, or one text with commas."""
    if isinstance(value, list):
        return tuple(str(one) for one in value)
    return tuple(one for one in str(value or "").split(",") if one and one not in NOTHING)


def moment(text: str) -> float | None:
    """`2026-11-29T08:25:39` in UTC as seconds since 1970; None for NONE, Unknown and the like."""
    try:
        return datetime.strptime(text.strip(), "%Y-%m-%dT%H:%M:%S").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def states_of(value: object) -> frozenset[str]:
    """A node's states: `IDLE+DRAIN`, `mixed-`, `["IDLE", "DRAIN"]`. Empty if there is none in it."""
    parts = value if isinstance(value, list) else str(value or "").split("+")
    found = set[str]()
    for part in parts:
        word = _WORD.match(str(part).strip())
        if word is None:
            continue
        found.add(word.group().upper())
        found |= {SIGNS[sign] for sign in str(part).strip()[word.end() :] if sign in SIGNS}
    return frozenset(found)


def gpus_of(gres: str) -> int:
    """`gpu:h100:8(S:0-1)`: how many GPUs a node has."""
    return sum(int(count) for count in _GPUS.findall(gres.replace("(null)", "")))


def fields(line: str) -> dict[str, str]:
    """`Key=value Key=value`. The first of a key counts: free text that contains a `=` comes last in a line."""
    found = list(_KEY.finditer(line))
    ends = [one.start() for one in found[1:]] + [len(line)]
    pairs = [(one.group(1), line[one.end() : end].strip()) for one, end in zip(found, ends, strict=True)]
    return dict(reversed(pairs))


def lines_of(text: str, first: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The lines that begin with a key, and their fields. Raises `Unreadable` if there is none."""
    lines = [line for line in text.splitlines() if line.startswith(f"{first}=")]
    if not lines:
        raise Unreadable(f"no {first}= in {text.strip()[:80]!r}" if text.strip() else "it printed nothing")
    for line in lines:
        yield line, fields(line)


def items_of(text: str, key: str) -> list[dict[str, Any]]:
    """The list under a key of an answer in JSON. Raises `Unreadable`."""
    try:
        answer = json.loads(text)
    except ValueError as error:
        raise Unreadable(f"it is no JSON ({error})" if text.strip() else "it printed nothing") from error
    found = answer.get(key) if isinstance(answer, dict) else None
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise Unreadable(f"no list {key!r} in {text.strip()[:80]!r}")
    return found


def whole(value: object) -> str:
    """A text; empty for what stands for nothing."""
    text = "" if value is None else str(value)
    return "" if text in NOTHING else text


# ---------------------------------------------------------------- nodes


def nodes_of_text(text: str) -> list[NodeRecord]:
    """`scontrol show nodes -o`. Raises `Unreadable`."""
    return [
        _node(
            found["NodeName"],
            states_of(found.get("State", "")),
            reason_of(line),
            found.get("Gres", ""),
            words(found.get("Partitions", "")),
        )
        for line, found in lines_of(text, "NodeName")
    ]


def nodes_of_json(text: str) -> list[NodeRecord]:
    """`scontrol show nodes --json`. Raises `Unreadable`."""
    nodes = items_of(text, "nodes")
    if not nodes:
        raise Unreadable("no node in it")
    return [
        _node(
            whole(one.get("name")),
            states_of(one.get("state")) | states_of(one.get("state_flags") or []),
            whole(one.get("reason")),
            whole(one.get("gres")),
            words(one.get("partitions")),
        )
        for one in nodes
    ]


def _node(name: str, states: frozenset[str], reason: str, gres: str, partitions: tuple[str, ...]) -> NodeRecord:
    if not name or not states:
        raise Unreadable(f"the node {name!r} has no state")
    return NodeRecord(name=name, states=states, reason=reason, gpus=gpus_of(gres), partitions=partitions)


def reason_of(line: str) -> str:
    """An operator's words, without who said them and when."""
    found = _REASON.search(line)
    return found.group(1).strip() if found else ""


# ---------------------------------------------------------------- jobs

# What `squeue -o` is asked for. The comment comes last, as it may contain the sign between the columns.
COLUMNS = "%A|%T|%P|%e|%r|%N|%j|%k"


def rows_of(text: str) -> list[JobRow]:
    """`squeue -h -o COLUMNS`; an empty queue is no error. Raises `Unreadable`."""
    rows = list[JobRow]()
    for line in text.splitlines():
        parts = line.split("|", 7)
        if len(parts) < 8 or not re.match(r"\d", parts[0]):
            if rows or not line.strip():
                continue  # the rest of a comment with several lines
            raise Unreadable(f"no row of a queue: {line[:80]!r}")
        if not parts[0].isdigit():
            continue  # several tasks of an array that wait: never ours
        job, state, partition, ends, reason, nodes, name, comment = parts
        rows.append(
            JobRow(
                job=int(job),
                state=state,
                name=name,
                nodes=_nodes(nodes),
                partition=partition,
                end_at=moment(ends),
                reason=reason,
                comment=whole(comment),
            )
        )
    return rows


def _nodes(text: str) -> tuple[str, ...]:
    try:
        return expand(text)
    except ValueError as error:
        raise Unreadable(str(error)) from error


def notices_of(text: str) -> dict[int, float]:
    """`squeue -h -O JobID:20,PreemptTime:20`: jobs that are told to go, and since when."""
    found = dict[int, float]()
    for line in text.splitlines():
        parts = line.split()
        when = moment(parts[1]) if len(parts) > 1 and parts[0].isdigit() else None
        if when is not None:
            found[int(parts[0])] = when
    return found


ASKED = ("Account", "QOS", "Reservation", "Features", "TresPerNode", "TresPerJob", "OverSubscribe", "MinMemoryNode")
OTHER_NAMES = {
    "Account": "account", "QOS": "qos", "Reservation": "resv_name", "Features": "features",
    "TresPerNode": "tres_per_node", "TresPerJob": "tres_per_job", "SubmitLine": "submit_line",
}  # fmt: skip


def job_of_text(text: str, wanted: int = 0) -> JobRecord:
    """`scontrol show job -o ID`. Raises `Unreadable`. `wanted`: of a job array all tasks are shown; 0: the first."""
    all_of_them = [found for _, found in lines_of(text, "JobId")]
    found = next((one for one in all_of_them if one["JobId"] == str(wanted)), all_of_them[0])
    if not found["JobId"].isdigit() or not found.get("JobState"):
        raise Unreadable(f"no job with a state: {text.strip()[:80]!r}")
    asked = {key: value for key in (*ASKED, "SubmitLine") if (value := whole(found.get(key)))}
    asked |= {key: found[key] for key in ("NumCPUs", "NumNodes") if found.get(key, "").isdigit()}
    return JobRecord(
        job=int(found["JobId"]),
        name=found.get("JobName", ""),
        state=found["JobState"],
        nodes=_nodes(found.get("NodeList", "")),
        batch_host=whole(found.get("BatchHost")),
        partition=found.get("Partition", ""),
        end_at=moment(found.get("EndTime", "")),
        preempt_at=moment(found.get("PreemptTime", "")),
        asked=asked,
    )


def job_of_json(text: str, wanted: int = 0) -> JobRecord:
    """`scontrol show job ID --json`. Raises `Unreadable`. `wanted`: as in `job_of_text`."""
    jobs = items_of(text, "jobs")
    found = next((one for one in jobs if number(one.get("job_id")) == wanted), jobs[0] if jobs else {})
    job, states = number(found.get("job_id")), words(found.get("job_state"))
    if job is None or not states:
        raise Unreadable(f"no job with a state: {text.strip()[:80]!r}")
    asked = {key: value for key, other in OTHER_NAMES.items() if (value := whole(found.get(other)))}
    if "NONE" in words(found.get("shared")) or "none" in words(found.get("shared")):
        asked["OverSubscribe"] = "NO"
    for key, other in (("NumCPUs", "cpus"), ("NumNodes", "node_count"), ("MinMemoryNode", "memory_per_node")):
        count = number(found.get(other))
        if count:
            asked[key] = f"{count:.0f}"
    return JobRecord(
        job=int(job),
        name=whole(found.get("name")),
        state=states[0],
        nodes=_nodes(whole(found.get("nodes"))),
        batch_host=whole(found.get("batch_host")),
        partition=whole(found.get("partition")),
        end_at=number(found.get("end_time")) or None,
        preempt_at=number(found.get("preempt_time")) or None,
        asked=asked,
    )


# ---------------------------------------------------------------- partitions, reservations, configuration


def partitions_of(text: str) -> list[Partition]:
    """`scontrol show partition -o`. Raises `Unreadable`."""
    return [
        Partition(
            name=found["PartitionName"],
            tier=int(number(found.get("PriorityTier")) or 0),
            preempt_mode=found.get("PreemptMode", "").upper(),
            nodes=frozenset(_nodes(found.get("Nodes", ""))),
            grace_s=int(number(found.get("GraceTime")) or 0),
            is_up=found.get("State", "UP") == "UP",
        )
        for _, found in lines_of(text, "PartitionName")
    ]


def partitions_of_json(text: str) -> list[Partition]:
    """`scontrol show partition --json`. Raises `Unreadable`."""
    found = []
    for one in items_of(text, "partitions"):
        state = (one.get("partition") or {}).get("state") or ["UP"]
        found.append(
            Partition(
                name=whole(one.get("name")),
                tier=int(number((one.get("priority") or {}).get("tier")) or 0),
                preempt_mode=",".join(words(one.get("preempt_mode"))).upper(),
                nodes=frozenset(_nodes(whole((one.get("nodes") or {}).get("configured")))),
                grace_s=int(number(one.get("grace_time")) or 0),
                is_up="UP" in words(state),
            )
        )
    return found


def reservations_of(text: str) -> list[Reservation]:
    """`scontrol show reservation -o`; none is no error. Raises `Unreadable`."""
    if not text.strip() or text.startswith("No reservations"):
        return []
    return [
        Reservation(
            name=found["ReservationName"],
            start_at=moment(found.get("StartTime", "")),
            flags=frozenset(words(found.get("Flags", ""))),
            nodes=frozenset(_nodes(found.get("Nodes", ""))),
        )
        for _, found in lines_of(text, "ReservationName")
    ]


def config_of(text: str) -> dict[str, str]:
    """`scontrol show config`: settings by name. Raises `Unreadable` if there is no version among them."""
    pairs = [line.partition("=") for line in text.splitlines() if "=" in line]
    found = {key.strip(): value.strip() for key, sign, value in pairs if sign}
    if version_of(found.get("SLURM_VERSION", "")) is None:
        raise Unreadable(f"no SLURM_VERSION in {text.strip()[:80]!r}" if text.strip() else "it printed nothing")
    return found


def version_of(text: str) -> Version | None:
    """`22.05.8`, `slurm-wlm 24.11.5`, `26.05.0-rc1`: three numbers."""
    found = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    return (int(found.group(1)), int(found.group(2)), int(found.group(3) or 0)) if found else None
