"""Registry: every verb of the command line, in one table. The command, its help, the reference and tests read it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from enum import StrEnum
from importlib import import_module
from typing import Any, NamedTuple

from torchrelay.terminal import words

Flags = Callable[[argparse.ArgumentParser], object]


class Family(StrEnum):
    """Where a verb's module is: the room of this package with this name."""

    LAUNCH = "launch"
    VIEW = "view"
    OPERATE = "operate"
    DIAGNOSE = "diagnose"
    NETWORK = "network"
    FORECASTS = "forecasts"


class Verb(NamedTuple):
    """A row of the table.

    call        MODULE:FUNCTION in the family's room; the module is imported only when its verb is asked for
    flags       what its parser takes, in the order of its help; None: the function parses the words itself
    changes     it changes a run that exists: its plan comes first, and it takes --yes and --dry-run
    negatives   values of its flags may begin with a minus
    """

    name: str
    family: Family
    call: str
    help: str
    flags: tuple[Flags, ...] | None = None
    changes: bool = False
    negatives: bool = False

    @property
    def module(self) -> str:
        return f"{__package__}.{self.family}.{self.call.partition(':')[0]}"

    def load(self) -> Callable[[Any], int | None]:
        """Import what carries it out. Takes what was given, or the words; returns the exit code, None for 0."""
        function: Callable[[Any], int | None] = getattr(import_module(self.module), self.call.partition(":")[2])
        return function


LOOKING = (words.of_run, words.of_job, words.watched, words.printed)
OF_PLACES = (words.of_run, words.printed, words.confirmed)
ROWS = (
    Verb(
        "run", Family.LAUNCH, "run:run",
        "start a script as torchrun does, and keep it going through faults",
    ),
    Verb(
        "agent", Family.LAUNCH, "agent:run",
        "make this machine a node of a job that was started elsewhere: --join HOST:PORT --token-file F",
    ),
    Verb(
        "attach", Family.LAUNCH, "attach:attach",
        "follow a run as its launcher did: after that is lost, or from elsewhere; Ctrl-C leaves the job alone",
        (words.of_run, words.attached),
    ),
    Verb(
        "status", Family.VIEW, "status:show_status",
        "how a job is doing: step, generation, phase and why, spares, incidents, moves, freezes, taints",
        LOOKING,
    ),
    Verb(
        "ranks", Family.VIEW, "lists:show_list",
        "which worker holds each rank, where, and what it does; and the spares",
        (*LOOKING, words.one_rank),
    ),
    Verb(
        "nodes", Family.VIEW, "lists:show_list",
        "the nodes, what each slot holds, taints with their age, and the faults that are remembered",
        (words.of_run, words.watched, words.printed),
    ),
    Verb(
        "spares", Family.VIEW, "lists:show_list",
        "workers without a rank: where, warm or not, target of which move, refused by which taint",
        LOOKING,
    ),
    Verb(
        "moves", Family.VIEW, "lists:show_list",
        "planned and pre-emptive moves of ranks: state, from where to where, why, and the pause",
        LOOKING,
    ),
    Verb(
        "incidents", Family.VIEW, "lists:show_list",
        "every interruption, and how it was resolved",
        LOOKING,
    ),
    Verb(
        "explain", Family.VIEW, "explain:show_explanation",
        "an incident, a move, a rank, a node, a slot or a spare: what was decided and why, or why not",
        (words.of_run, words.of_job, words.printed, words.about),
    ),
    Verb(
        "report", Family.VIEW, "report:show_report",
        "the ledger: one line per incident, the totals, the clean ratio with its confidence interval",
        (words.of_run, words.of_job, words.printed_by_line, words.of_ledger), negatives=True,
    ),
    Verb(
        "audit", Family.VIEW, "lists:show_list",
        "every changing call: who, when, what",
        (words.of_run, words.printed),
    ),
    Verb(
        "migrate", Family.OPERATE, "migrate:migrate",
        "move ranks somewhere else, together, while training goes on",
        (words.of_run, words.of_job, words.printed, words.confirmed, words.reasoned, words.moved), changes=True,
    ),
    Verb(
        "park", Family.OPERATE, "park:park",
        "write the job down at the next boundary and end it with 75; `run --resume DIR` goes on from there",
        (words.of_run, words.of_job, words.printed, words.confirmed, words.reasoned), changes=True,
    ),
    Verb(
        "taint", Family.OPERATE, "taints:taint",
        "hold something against a node or a slot: NODE[/SLOT] KEY[=VALUE][:EFFECT]",
        (*OF_PLACES, words.reasoned, words.of_place, words.tainted), changes=True,
    ),
    Verb(
        "untaint", Family.OPERATE, "taints:untaint",
        "lift a taint; if it reported a fault, the place goes on probation, unless it was a mistake (--healed)",
        (*OF_PLACES, words.of_place, words.untainted), changes=True,
    ),
    Verb(
        "drain", Family.OPERATE, "taints:drain",
        "empty a node: its ranks move away, all at once or not at all, and nothing new is put there",
        (*OF_PLACES, words.reasoned, words.of_place), changes=True,
    ),
    Verb(
        "undrain", Family.OPERATE, "taints:undrain",
        "a drained node may be used again",
        (*OF_PLACES, words.of_place), changes=True,
    ),
    Verb(
        "cordon", Family.OPERATE, "taints:cordon",
        "put nothing new on a node; what runs there stays",
        (*OF_PLACES, words.reasoned, words.of_place), changes=True,
    ),
    Verb(
        "uncordon", Family.OPERATE, "taints:uncordon",
        "a node that was cordoned or drained may be used again",
        (*OF_PLACES, words.of_place), changes=True,
    ),
    Verb(
        "freeze", Family.OPERATE, "freeze:freeze",
        "observe only: no moves and no recoveries; a fault ends the job as without torchrelay",
        (words.of_run, words.printed, words.confirmed, words.reasoned, words.of_all_runs), changes=True,
    ),
    Verb(
        "unfreeze", Family.OPERATE, "freeze:unfreeze",
        "end the freeze",
        (words.of_run, words.printed, words.confirmed, words.of_all_runs), changes=True,
    ),
    Verb(
        "restart-services", Family.OPERATE, "restart:restart",
        "restart the orchestrator and the agents with the code that is installed now; training goes on",
        (words.of_run, words.printed, words.confirmed, words.services), changes=True,
    ),
    Verb(
        "chaos", Family.DIAGNOSE, "chaos:chaos",
        "break your own job on purpose, and see how it gets over it: a rank, a node, a link, an agent, ...",
        changes=True,
    ),
    Verb(
        "net", Family.NETWORK, "net:net",
        "the network part: its plugin for NCCL (env, path), and the state of all paths (status)",
    ),
    Verb(
        "cost", Family.FORECASTS, "cost:cost",
        "what failures cost, what migration saves, published figures worked through, advice on checkpoints",
    ),
    Verb(
        "simulate", Family.FORECASTS, "simulate:simulate",
        "what faults will do to a job over months, under each way of getting over them; traces described",
    ),
    Verb(
        "doctor", Family.DIAGNOSE, "consult:consult",
        "check what a run needs from this machine (exit code 0: all well, 1: remarks, 2: it will not run)",
        (words.of_run, words.of_job, words.printed, words.examined),
    ),
)  # fmt: skip
VERBS = {verb.name: verb for verb in ROWS}
