"""Words: the flags of the verbs, each as a function that adds them to a verb's parser, in the order of its help."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchrelay.terminal.show import Output

EFFECTS = ("NoExecute", "NoSchedule", "PreferNoSchedule")

# ---------------------------------------------------------------- what many verbs have in common


def of_run(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--run-dir", type=Path, help="the run's folder (the newest under ./torchrelay-runs)")
    verb.add_argument("--url", metavar="URL", help="of its orchestrator, from another machine: https://HOST:PORT")
    verb.add_argument("--ca", type=Path, metavar="F", help="with --url: the run's passes/viewer.pem or operator.pem")


def of_job(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--job", help="the job (the newest of the run)")


def watched(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("-w", "--watch", action="store_true", help="again every second, until Ctrl-C")


def printed(verb: argparse.ArgumentParser) -> None:
    add_output(verb, Output.TABLE, Output.JSON)


def printed_by_line(verb: argparse.ArgumentParser) -> None:
    add_output(verb, *Output)


def confirmed(verb: argparse.ArgumentParser) -> None:
    """The words of a verb that shows its plan and asks."""
    verb.add_argument("-y", "--yes", action="store_true", help="do not ask")
    verb.add_argument("--dry-run", action="store_true", help="print what would happen, and change nothing")


def reasoned(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--reason", default="", help="why; it is shown wherever what follows is explained")


def of_place(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("place", metavar="NODE[/SLOT]", help="a node, or one slot of it")


# ---------------------------------------------------------------- of verbs that look


def attached(attach: argparse.ArgumentParser) -> None:
    attach.add_argument("-j", "--job", help="the job (the newest of the run)")
    attach.add_argument(
        "--patience",
        type=float,
        default=600.0,
        metavar="S",
        help="how long to wait while no orchestrator acts, as after the loss of the head's machine (600)",
    )


def one_rank(ranks: argparse.ArgumentParser) -> None:
    ranks.add_argument("--rank", type=int, help="this one only")


def about(explain: argparse.ArgumentParser) -> None:
    explain.add_argument(
        "about",
        nargs="+",
        metavar="NAME",
        help="an incident (I-3, or 3), a move (M-3), `rank 3`, a node (node-1), a slot (node-1/0), or a worker",
    )


def of_ledger(report: argparse.ArgumentParser) -> None:
    """The words of the ledger."""
    report.add_argument("--write", action="store_true", help="also write the lines to RUN_DIR/ledger.jsonl")
    report.add_argument(
        "--guarantee",
        action="store_true",
        help="how many interruptions were resolved clean, how sure that is, and what is not counted, with evidence",
    )
    ours = report.add_argument_group("with --guarantee")
    ours.add_argument("--since", metavar="WHEN", help="from then on: 30d, 12h, or a date as 2026-10-01 (all)")
    ours.add_argument(
        "--ledger",
        type=Path,
        nargs="+",
        action="extend",
        metavar="FILE",
        help="also these: files written by `report --write`, or folders of runs that have one",
    )
    ours.add_argument("--target", metavar="SHARE", help="what is to be shown: 0.9, or 90%% (0.9)")
    ours.add_argument("--check", action="store_true", help="exit code 1 unless the lower bound reaches the target")
    ours.add_argument(
        "--exclude",
        nargs=3,
        action="append",
        metavar=("NAME", "REASON", "EVIDENCE"),
        help="do not count I-7 (or JOB/I-7): user-bug, operator-stop or storage-outage, and what shows it",
    )


def examined(doctor: argparse.ArgumentParser) -> None:
    """The words of the doctor."""
    doctor.add_argument(
        "--layout",
        action="store_true",
        help="of a job: where each rank's state would come from if it were lost now, and how much may be lost at once",
    )
    doctor.add_argument(
        "--net", action="store_true", help="the network: which paths there are, and what protects control traffic"
    )
    ahead = doctor.add_argument_group(
        "with --layout, of a script that is not launched yet (else of a run): each rank runs it alone, up to protect()"
    )
    ahead.add_argument("--nodes", "--nnodes", type=positive, default=1, metavar="N", help="nodes (1)")
    ahead.add_argument(
        "--nproc-per-node", "--nproc_per_node", type=positive, default=1, metavar="N", help="ranks on each node (1)"
    )
    ahead.add_argument("-m", "--module", action="store_true", help="the script is a module's name")
    ahead.add_argument(
        "script",
        nargs=argparse.REMAINDER,
        help="the script and its own arguments; or the word slurm: what Slurm here lets a job do",
    )


# ---------------------------------------------------------------- of verbs that change something


def moved(migrate: argparse.ArgumentParser) -> None:
    migrate.add_argument("ranks", nargs="*", type=int, metavar="RANK", help="ranks that move together")
    migrate.add_argument("--node", help="all ranks on this node")
    migrate.add_argument("--to", metavar="NODE", help="where they go (wherever there is room)")
    migrate.add_argument("--cancel", action="store_true", help="withdraw the request for a move")


def tainted(taint: argparse.ArgumentParser) -> None:
    taint.add_argument(
        "taint",
        metavar="KEY[=VALUE][:EFFECT]",
        help=f"effects: {', '.join(EFFECTS)} (NoExecute: what runs there moves away)",
    )
    taint.add_argument("--ttl", metavar="TIME", help="it lifts itself after this time: 90s, 10m, 2h, 1d")


def untainted(untaint: argparse.ArgumentParser) -> None:
    untaint.add_argument("key", metavar="KEY", help="the taint's key")
    untaint.add_argument("--healed", action="store_true", help="it was a mistake: no probation follows")


def of_all_runs(freeze: argparse.ArgumentParser) -> None:
    freeze.add_argument("--all", action="store_true", help="all runs in the same folder, later ones too")


def services(restart: argparse.ArgumentParser) -> None:
    restart.add_argument("--orchestrator", action="store_true", help="only this (without either: both)")
    restart.add_argument("--agents", action="store_true", help="only these, one after the other")
    restart.add_argument("--force", action="store_true", help="also during a recovery or a move")


# ---------------------------------------------------------------- values


def positive(text: str) -> int:
    """A number from 1 on. Raises `ValueError`, as argparse wants it."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def add_output(verb: argparse.ArgumentParser, *kinds: Output) -> None:
    verb.add_argument(
        "-o",
        "--output",
        type=Output,
        choices=kinds,
        default=Output.TABLE,
        help="how it is printed",
        metavar="{" + ",".join(kinds) + "}",
    )
