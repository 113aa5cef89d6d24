"""Words: the command line of all verbs but `run`, whose words are torchrun's and the script's."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchrelay.terminal.show import Output

DESCRIPTION = "Keeps a distributed PyTorch run going through faults, at the same step, to the same bits."
VERBS = {
    "run": "start a script as torchrun does, and keep it going through faults",
    "status": "how a job is doing: step, generation, phase and why, spares, incidents, moves, freezes, taints",
    "ranks": "which worker holds each rank, where, and what it does; and the spares",
    "nodes": "the nodes, what each slot holds, taints with their age, and the faults that are remembered",
    "spares": "workers without a rank: where, warm or not, target of which move, refused by which taint",
    "moves": "planned and pre-emptive moves of ranks: state, from where to where, why, and the pause",
    "incidents": "every interruption, and how it was resolved",
    "explain": "an incident, a move, a rank, a node, a slot or a spare: what was decided and why, or why not",
    "report": "the ledger: one line per incident, the totals, the clean ratio with its confidence interval",
    "audit": "every changing call: who, when, what",
    "migrate": "move ranks somewhere else, together, while training goes on",
    "taint": "hold something against a node or a slot: NODE[/SLOT] KEY[=VALUE][:EFFECT]",
    "untaint": "lift a taint; if it reported a fault, the place goes on probation, unless it was a mistake (--healed)",
    "drain": "empty a node: its ranks move away, all at once or not at all, and nothing new is put there",
    "undrain": "a drained node may be used again",
    "cordon": "put nothing new on a node; what runs there stays",
    "uncordon": "a node that was cordoned or drained may be used again",
    "freeze": "observe only: no moves and no recoveries; a fault ends the job as without torchrelay",
    "unfreeze": "end the freeze",
    "restart-services": "restart the orchestrator and the agents with the code that is installed now; training goes on",
    "chaos": "break your own job on purpose, and see how it gets over it: a rank, a node, a link, an agent, ...",
    "net": "the network part: its plugin for NCCL (env, path), and the state of all paths (status)",
    "cost": "what failures cost, what migration saves, published figures worked through, advice on checkpoints",
    "simulate": "what faults will do to a job over months, under each way of getting over them; traces described",
    "doctor": "check what a run needs from this machine (exit code 0: all well, 1: remarks, 2: it will not run)",
}
LOOKING = ("status", "ranks", "nodes", "spares", "moves", "incidents", "explain", "report", "audit")
WATCHED = ("status", "ranks", "nodes", "spares", "moves", "incidents")
PLACES = ("taint", "untaint", "drain", "undrain", "cordon", "uncordon")
CHANGING = ("migrate", *PLACES, "freeze", "unfreeze", "restart-services")
EFFECTS = ("NoExecute", "NoSchedule", "PreferNoSchedule")
ASKS = """
The plan is printed first. On a terminal it asks for confirmation (--yes skips this); without a terminal it acts at
once, as kubectl and scontrol do. --dry-run prints the plan only. Exit code 0: done, or nothing to do; 1: declined, or
the orchestrator does not answer; 2: invalid request; the message says why.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="torchrelay", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action=Version, help="show the version and exit")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    made = {}
    for name, text in VERBS.items():
        about = text[0].upper() + text[1:] + "." + (ASKS if name in CHANGING else "")
        made[name] = verbs.add_parser(name, help=text, description=about, allow_abbrev=False)
    for name in (*LOOKING, *CHANGING, "doctor"):
        made[name].add_argument("--run-dir", type=Path, help="the run's folder (the newest under ./torchrelay-runs)")
    for name in ("status", "ranks", "spares", "moves", "incidents", "explain", "report", "migrate", "doctor"):
        made[name].add_argument("--job", help="the job (the newest of the run)")
    for name in WATCHED:
        made[name].add_argument("-w", "--watch", action="store_true", help="again every second, until Ctrl-C")
    for name in VERBS:
        if name not in ("run", "report", "net", "cost", "simulate"):
            add_output(made[name], Output.TABLE, Output.JSON)
    add_output(made["report"], *Output)
    made["doctor"].add_argument(
        "--layout", action="store_true",
        help="of a job: where each rank's state would come from if it were lost now, and how much may be lost at once",
    )  # fmt: skip
    made["doctor"].add_argument(
        "--net", action="store_true", help="the network: which paths there are, and what protects control traffic"
    )
    ahead = made["doctor"].add_argument_group(
        "with --layout, of a script that is not launched yet (else of a run): each rank runs it alone, up to protect()"
    )
    ahead.add_argument("--nodes", "--nnodes", type=positive, default=1, metavar="N", help="nodes (1)")
    ahead.add_argument(
        "--nproc-per-node", "--nproc_per_node", type=positive, default=1, metavar="N", help="ranks on each node (1)"
    )
    ahead.add_argument("-m", "--module", action="store_true", help="the script is a module's name")
    ahead.add_argument("script", nargs=argparse.REMAINDER, help="the script and its own arguments")
    made["ranks"].add_argument("--rank", type=int, help="this one only")
    made["explain"].add_argument(
        "about", nargs="+", metavar="NAME",
        help="an incident (I-3, or 3), a move (M-3), `rank 3`, a node (node-1), a slot (node-1/0), or a worker",
    )  # fmt: skip
    add_report(made["report"])
    add_changes(made)
    return parser


def add_report(report: argparse.ArgumentParser) -> None:
    """The words of the ledger."""
    report.add_argument("--write", action="store_true", help="also write the lines to RUN_DIR/ledger.jsonl")
    report.add_argument(
        "--guarantee", action="store_true",
        help="how many interruptions were resolved clean, how sure that is, and what is not counted, with evidence",
    )  # fmt: skip
    ours = report.add_argument_group("with --guarantee")
    ours.add_argument("--since", metavar="WHEN", help="from then on: 30d, 12h, or a date as 2026-10-01 (all)")
    ours.add_argument(
        "--ledger", type=Path, nargs="+", action="extend", metavar="FILE",
        help="also these: files written by `report --write`, or folders of runs that have one",
    )  # fmt: skip
    ours.add_argument("--target", metavar="SHARE", help="what is to be shown: 0.9, or 90%% (0.9)")
    ours.add_argument("--check", action="store_true", help="exit code 1 unless the lower bound reaches the target")
    ours.add_argument(
        "--exclude", nargs=3, action="append", metavar=("NAME", "REASON", "EVIDENCE"),
        help="do not count I-7 (or JOB/I-7): user-bug, operator-stop or storage-outage, and what shows it",
    )  # fmt: skip


def add_changes(made: dict[str, argparse.ArgumentParser]) -> None:
    """The words of the verbs that change something."""
    for name in CHANGING:
        made[name].add_argument("-y", "--yes", action="store_true", help="do not ask")
        made[name].add_argument("--dry-run", action="store_true", help="print what would happen, and change nothing")
    for name in ("migrate", "taint", "drain", "cordon", "freeze"):
        made[name].add_argument("--reason", default="", help="why; it is shown wherever what follows is explained")
    migrate = made["migrate"]
    migrate.add_argument("ranks", nargs="*", type=int, metavar="RANK", help="ranks that move together")
    migrate.add_argument("--node", help="all ranks on this node")
    migrate.add_argument("--to", metavar="NODE", help="where they go (wherever there is room)")
    migrate.add_argument("--cancel", action="store_true", help="not any more: what was asked for is withdrawn")
    for name in PLACES:
        made[name].add_argument("place", metavar="NODE[/SLOT]", help="a node, or one slot of it")
    made["taint"].add_argument(
        "taint", metavar="KEY[=VALUE][:EFFECT]",
        help=f"effects: {', '.join(EFFECTS)} (NoExecute: what runs there moves away)",
    )  # fmt: skip
    made["taint"].add_argument("--ttl", metavar="TIME", help="it lifts itself after this time: 90s, 10m, 2h, 1d")
    made["untaint"].add_argument("key", metavar="KEY", help="the taint's key")
    made["untaint"].add_argument("--healed", action="store_true", help="it was a mistake: no probation follows")
    for name in ("freeze", "unfreeze"):
        made[name].add_argument("--all", action="store_true", help="all runs in the same folder, later ones too")
    made["restart-services"].add_argument(
        "--orchestrator", action="store_true", help="only this (without either: both)"
    )
    made["restart-services"].add_argument("--agents", action="store_true", help="only these, one after the other")
    made["restart-services"].add_argument("--force", action="store_true", help="also during a recovery or a move")


def positive(text: str) -> int:
    """A number from 1 on. Raises `ValueError`, as argparse wants it."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def add_output(verb: argparse.ArgumentParser, *kinds: Output) -> None:
    verb.add_argument("-o", "--output", type=Output, choices=kinds, default=Output.TABLE, help="how it is printed",
                      metavar="{" + ",".join(kinds) + "}")  # fmt: skip


class Version(argparse.Action):
    """Looks the version up only when it is asked for: that takes longer than all else."""

    def __init__(self, option_strings: list[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        parser.exit(message=f"torchrelay {version('torchrelay')}\n")
