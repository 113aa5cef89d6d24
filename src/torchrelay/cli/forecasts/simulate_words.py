"""Words of `torchrelay simulate`: a flag for everything that a forecast depends on, with its default and its unit."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path

from torchrelay.cli.forecasts.cost_words import rate
from torchrelay.cli.forecasts.numbers import amount_in, whole_number
from torchrelay.client.runs import NotPossible
from torchrelay.economics.formulas.rates import Counting, Unreasonable, unreasonable_value
from torchrelay.economics.published.field import META_RATE, RATES, VENDOR_GPUS, VENDOR_MTTF_H
from torchrelay.forecast.inputs.faults import Gap, Process
from torchrelay.forecast.inputs.layouts import KNOWN, layout_of
from torchrelay.forecast.inputs.phases import Phases, Span, phases_of_ledger
from torchrelay.forecast.inputs.settings import DEFAULT_POLICY, Costs, Settings, Short, Strategy, check_policy
from torchrelay.forecast.inputs.trace import Trace, read_trace
from torchrelay.forecast.sweep import SWEEPS
from torchrelay.terminal.show import Output

PRESETS = ("ettr-table", "benchmark-64", "llama3")
HOURS = {"s": 1 / 3600, "m": 1 / 60, "h": 1.0, "d": 24.0}
ABOUT = """What faults will cost a job over weeks or months, and what each way of getting over them saves.

Faults come by a process that is given, or as a trace has them. Migration is decided by torchrelay's own protocol core:
another policy (--policy, another version) gives another forecast. Every figure has its 95 % confidence interval over
runs with different seeds; all strategies meet the same faults.
"""
EXAMPLES = """
torchrelay simulate --gpus 1024 --rate llama3 --spares 8 --days 54
torchrelay simulate --gpus 16384 --strategy migration --layout hsdp=4 --ledger ledger.jsonl
torchrelay simulate --sweep spares=0,2,4,8,16 --plot spares.png
torchrelay simulate --policy ranks_per_slot=2 --spares 0
torchrelay simulate --trace faults.csv --describe
torchrelay simulate --preset ettr-table                  a published table beside ours; also benchmark-64, llama3

A TIME has its unit: 90s, 10m, 1.5h, 54d.
Exit code: 0: done; 2: an input cannot be, and which.
"""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchrelay simulate",
        description=ABOUT,
        epilog=EXAMPLES,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="torchrelay simulate [FLAGS]",
    )
    add_asked(parser.add_argument_group("what is asked"))
    add_job(parser.add_argument_group("the job"))
    add_faults(parser.add_argument_group("faults"))
    add_spares(parser.add_argument_group("spares"))
    add_costs(parser.add_argument_group("what recovering takes"))
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a plot of the result (PNG, SVG or PDF)")
    parser.add_argument(
        "-o",
        "--output",
        type=Output,
        choices=[Output.TABLE, Output.JSON],
        default=Output.TABLE,
        metavar="{table,json}",
        help="how it is printed",
    )
    return parser


def add_asked(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--strategy", metavar="NAME,...", help=f"of: {', '.join(Strategy)} (all but covered)")
    group.add_argument(
        "--sweep", metavar="NAME=V,V,...", help=f"change one of: {', '.join(SWEEPS)} (interval: minutes)"
    )
    group.add_argument("--preset", choices=PRESETS, metavar="NAME", help=f"a published case: {', '.join(PRESETS)}")
    group.add_argument("--quick", action="store_true", help="with --preset ettr-table: without the full model")
    group.add_argument("--trace", type=Path, metavar="FILE", help="replay these faults (CSV: start,end,node,cause)")
    group.add_argument("--describe", action="store_true", help="with --trace: what it says of faults; nothing is run")
    group.add_argument(
        "--trace-nodes",
        type=int,
        metavar="N",
        help="with --describe: how many nodes there were (as many as the trace names)",
    )
    group.add_argument("--runs", type=int, metavar="N", help="with seeds of their own (5)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the first run (0)")


def add_job(group: argparse._ArgumentGroup) -> None:
    known = Settings()
    group.add_argument("--gpus", type=whole_number, metavar="N", help=f"of the job ({known.gpus})")
    group.add_argument("--gpus-per-node", type=whole_number, metavar="N", help=f"({known.gpus_per_node})")
    group.add_argument(
        "--days",
        type=amount_in("days"),
        metavar="DAYS",
        help=f"how long ({known.hours / 24:.1f}: a month; as long as a trace)",
    )
    group.add_argument("--work", metavar="TIME", help="instead: until so much is done, as undisturbed time (6d)")
    group.add_argument("--layout", metavar="LAYOUT", help=f"where copies of the state are: {KNOWN} (ddp)")
    group.add_argument("--step", metavar="TIME", help=f"a training step ({known.step_s:g}s)")
    group.add_argument("--mfu", type=float, metavar="SHARE", help=f"of an undisturbed step ({known.mfu})")
    group.add_argument("--price", type=float, metavar="DOLLARS", help=f"per GPU-hour ({known.price:g})")


def add_faults(group: argparse._ArgumentGroup) -> None:
    known = Process()
    group.add_argument(
        "--rate",
        type=rate,
        metavar="RATE",
        help="failures per 1,000 node-days: a number, or a published rate by its name: "
        f"{', '.join(known.name for known in RATES)} ({META_RATE}: meta; torchrelay cost takes headline, "
        f"{VENDOR_MTTF_H:g} h on {VENDOR_GPUS:,} GPUs: use your own)",
    )
    group.add_argument("--mttf", metavar="TIME", help="instead: mean time to failure of the whole job")
    group.add_argument(
        "--counting",
        type=Counting,
        choices=list(Counting),
        metavar="{wall,running}",
        help="which time faults come in (wall)",
    )
    group.add_argument("--calm-recovery", action="store_true", help="no fault counts that comes during a recovery")
    group.add_argument(
        "--gap", type=Gap, choices=list(Gap), metavar=f"{{{','.join(Gap)}}}", help="from fault to fault (exponential)"
    )
    group.add_argument(
        "--shape", type=float, metavar="K", help="of Weibull gaps; below 1: bursty (implies --gap weibull)"
    )
    group.add_argument("--burst", type=float, metavar="SHARE", help="of node faults that others follow in minutes (0)")
    group.add_argument("--switch", type=float, metavar="SHARE", help="of faults that take a switch's nodes (0)")
    group.add_argument("--switch-nodes", type=int, metavar="N", help=f"behind one ({known.switch_nodes})")
    group.add_argument("--lemons", type=float, metavar="SHARE", help="of nodes that fail more often (0)")
    group.add_argument("--lemon-times", type=float, metavar="N", help=f"so many times as often ({known.lemon_times:g})")
    group.add_argument("--process", type=float, metavar="SHARE", help="of faults: of a process, not its node (0)")
    group.add_argument("--path", type=float, metavar="SHARE", help="of faults: of one network path (0)")
    group.add_argument(
        "--failover", action="store_true", help="migration, covered: the loss of a path only slows training"
    )
    group.add_argument("--path-speed", type=float, metavar="SHARE", help="of training meanwhile (0.875)")
    group.add_argument("--repair", metavar="MEDIAN[,P90]", help="of a node, log-normal (20h,242h)")
    group.add_argument("--refail", metavar="DAY[,WEEK]", help="shares of repaired nodes that soon fail again (0,0)")
    group.add_argument("--foreseen", type=float, metavar="SHARE", help="of node faults with a warning (0)")
    group.add_argument("--lead", metavar="TIME", help="so long before (15m)")
    group.add_argument("--precision", type=float, metavar="SHARE", help="of warnings that come true (1)")


def add_spares(group: argparse._ArgumentGroup) -> None:
    known = Settings()
    group.add_argument(
        "--spares", metavar="N", help=f"dedicated nodes ({known.spares}); `unlimited`: not for migration"
    )
    group.add_argument("--floating", type=int, metavar="N", help="nodes that other jobs can be made to give up (0)")
    group.add_argument("--preempt", metavar="TIME", help="how long that takes (5m)")
    group.add_argument("--displaced", type=float, metavar="SHARE", help="what an hour of theirs is worth (1)")
    group.add_argument(
        "--short",
        type=Short,
        choices=list(Short),
        metavar="{wait,shrink}",
        help="what restart does without a spare (wait)",
    )
    group.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="of the protocol core, a field of its JobSpec: ranks_per_slot=2, ...",
    )


def add_costs(group: argparse._ArgumentGroup) -> None:
    known = Costs()
    group.add_argument(
        "--interval", metavar="TIME", help=f"between checkpoints ({known.interval_h:g}h for restart, else the best)"
    )
    group.add_argument("--save", metavar="TIME", help="for how long a save stops training (30s)")
    group.add_argument("--bring-up", metavar="R,S,B", help="replace a node, restore, start up (10m,5m,5m)")
    group.add_argument("--hot", metavar="TIME", help="bring-up with a hot spare (5m)")
    group.add_argument("--retry", type=float, metavar="SHARE", help="of bring-ups that fail and begin anew (0)")
    group.add_argument("--spread", type=float, metavar="SHARE", help="standard deviation of these times (0)")
    group.add_argument(
        "--snapshots", type=int, metavar="STEPS", help="migration: snapshots in memory every so many steps"
    )
    group.add_argument("--coverage", type=float, metavar="SHARE", help="of strategy covered (0.9)")
    group.add_argument("--pause", metavar="TIME", help="of strategy covered (2m)")
    group.add_argument("--torchft-step", type=float, metavar="SHARE", help="by which its steps take longer (0.1)")
    group.add_argument("--torchft-stall", metavar="TIME", help="until the other groups go on (30s)")
    group.add_argument("--ledger", type=Path, metavar="FILE", help="draw migration's phases from a run's ledger.jsonl")
    group.add_argument(
        "--phase", action="append", default=[], metavar="NAME=TIME[:CV]", help="a phase of migration, given"
    )


# ---------------------------------------------------------------- what was said, as settings


def hours(flag: str, text: str, part: str | None = None) -> float:
    """A time in hours: 90s, 1.5m, 2h, 54d; of a list, of one `part` of it. Raises `NotPossible`.

    A bare number could be of any unit: it is refused, but for 0. Whether it may be negative is for others to say.
    """
    one = text if part is None else part
    which = "" if part is None else f"{part} is "
    found = re.fullmatch(r"(-?\d{1,12}(?:\.\d{1,9})?)([smhd]?)", one.strip())
    if found is None:
        raise NotPossible(f"{flag} {text}: {which}no time; give 90s, 10m, 1.5h or 54d", 2)
    if not found[2] and float(found[1]):
        bare = found[1].removeprefix("-")
        raise NotPossible(f"{flag} {text}: {which}without a unit; give {bare}s, {bare}m, {bare}h or {bare}d", 2)
    return float(found[1]) * HOURS[found[2] or "s"]


def parts(flag: str, text: str, least: int, most: int) -> list[str]:
    found = text.split(",")
    if not least <= len(found) <= most:
        raise NotPossible(
            f"{flag} {text}: give {least if least == most else f'{least} to {most}'} values, with commas", 2
        )
    return found


def number(flag: str, text: str, part: str) -> float:
    """A part of a list, as a number. Raises `NotPossible`."""
    try:
        found = float(part)
    except ValueError:
        found = float("nan")
    if not abs(found) < float("inf"):
        raise NotPossible(f"{flag} {text}: {part!r} is no number", 2)
    return found


def settings_of(given: argparse.Namespace) -> Settings:
    """The forecast that was asked for, but for the strategy. Raises `NotPossible`, `Unreasonable`, `ValueError`."""
    if given.rate is not None and given.mttf is not None:
        raise NotPossible("--rate and --mttf say the same thing: give one of them", 2)
    said: dict[str, object] = taken(
        given, "gpus", "gpus_per_node", "mfu", "price", "counting", "floating", "displaced", "short", "path_speed"
    )
    for name, flag, field in (
        ("work", "--work", "work_h"),
        ("mttf", "--mttf", "gap_h"),
        ("preempt", "--preempt", "preempt_h"),
    ):
        if getattr(given, name) is not None:
            said[field] = hours(flag, getattr(given, name))
    if given.days is not None:
        said["hours"] = 24 * given.days
    if given.step is not None:
        said["step_s"] = 3600 * hours("--step", given.step)
    if given.spares is not None:
        said["spares"] = None if given.spares == "unlimited" else count("--spares", given.spares)
    if given.snapshots is not None:
        said["snapshot_steps"] = given.snapshots
    trace = trace_of(given)
    if trace is not None and given.days is None and given.work is None:
        said["hours"] = trace.span_h  # all of it, and no time that it says nothing of
    gpus, per_node = given.gpus or Settings.gpus, given.gpus_per_node or Settings.gpus_per_node
    for name in ("gpus", "gpus_per_node"):
        if getattr(given, name) is not None and getattr(given, name) < 1:
            raise unreasonable_value(name, getattr(given, name), "it must be 1 or more")
    layout = layout_of("ddp" if given.layout is None else given.layout, gpus, per_node)
    return Settings(
        strategy=Strategy.RESTART,
        layout=layout,
        faults=faults_of(given),
        costs=costs_of(given),
        during_recovery=not given.calm_recovery,
        failover=given.failover,
        chosen=given.interval is not None,
        phases=phases_of(given),
        policy=policy_of(given.policy),
        trace=trace,
        trace_file=given.trace or Path("trace"),
        **said,  # type: ignore[arg-type]
    )


def taken(given: argparse.Namespace, *names: str) -> dict[str, object]:
    """Those that were given."""
    return {name: getattr(given, name) for name in names if getattr(given, name) is not None}


def count(flag: str, text: str) -> int:
    if not re.fullmatch(r"\d{1,7}", text):
        raise NotPossible(f"{flag} {text}: give a number of nodes, or `unlimited`", 2)
    return int(text)


def faults_of(given: argparse.Namespace) -> Process:
    said = taken(
        given,
        "rate",
        "gap",
        "shape",
        "burst",
        "switch",
        "switch_nodes",
        "lemons",
        "lemon_times",
        "process",
        "path",
        "foreseen",
        "precision",
    )
    if given.shape is not None:
        if given.gap not in (None, Gap.WEIBULL):
            raise NotPossible(f"--shape is of Weibull gaps, and --gap is {given.gap}", 2)
        said["gap"] = Gap.WEIBULL
    if given.lead is not None:
        said["lead_h"] = hours("--lead", given.lead)
    if given.repair is not None:
        median, *p90 = (hours("--repair", given.repair, text) for text in parts("--repair", given.repair, 1, 2))
        said |= {"repair_median_h": median, "repair_p90_h": p90[0] if p90 else median}
    if given.refail is not None:
        day, *week = (number("--refail", given.refail, text) for text in parts("--refail", given.refail, 1, 2))
        said |= {"refail_day": day, "refail_week": week[0] if week else day}
    return replace(Process(), **said)  # type: ignore[arg-type]


def costs_of(given: argparse.Namespace) -> Costs:
    said = taken(given, "retry", "spread", "coverage", "torchft_step")
    for name, field in (
        ("interval", "interval_h"),
        ("save", "save_h"),
        ("hot", "hot_h"),
        ("pause", "covered_h"),
        ("torchft_stall", "torchft_stall_h"),
    ):
        text = getattr(given, name)
        if text is not None:
            said[field] = hours(f"--{name.replace('_', '-')}", text)
    if given.bring_up is not None:
        values = [hours("--bring-up", given.bring_up, text) for text in parts("--bring-up", given.bring_up, 3, 3)]
        said |= dict(zip(("replacement_h", "restore_h", "startup_h"), values, strict=True))
    return replace(Costs(), **said)  # type: ignore[arg-type]


def phases_of(given: argparse.Namespace) -> Phases:
    """Phases as measured, as given, or assumed."""
    spans = {}
    for text in given.phase:
        found = re.fullmatch(r"([a-z]+)=([^:]+)(?::([\d.]+))?", text)
        if found is None:
            raise NotPossible(f"--phase {text}: give NAME=TIME, or NAME=TIME:CV as in restore=40s:0.3", 2)
        cv = {} if found[3] is None else {"cv": number("--phase", text, found[3])}
        try:
            spans[found[1]] = Span(3600 * hours("--phase", text, found[2]), **cv)
            Phases(spans)
        except Unreasonable as error:
            raise NotPossible(f"--phase {text}: {error.why}", 2) from None
    if given.ledger is None:
        return Phases(spans)
    try:
        return phases_of_ledger(given.ledger, spans)
    except ValueError as error:
        raise NotPossible(f"--ledger {error}", 2) from None


def policy_of(said: list[str]) -> dict[str, object]:
    """Fields of the core's JobSpec. Raises `NotPossible`."""
    found: dict[str, object] = {}
    for text in said:
        key, sign, value = text.partition("=")
        known = DEFAULT_POLICY.get(key)
        if not sign:
            raise NotPossible(f"--policy {text}: give KEY=VALUE", 2)
        if isinstance(known, bool):
            if value not in ("true", "false"):
                raise NotPossible(f"--policy {text}: true or false", 2)
            found[key] = value == "true"
        elif known is not None and not re.fullmatch(r"-?\d{1,15}", value):
            raise NotPossible(f"--policy {text}: a whole number", 2)
        else:
            found[key] = int(value) if known is not None else value
        try:
            check_policy(key, found[key])
        except Unreasonable as error:
            raise NotPossible(f"--policy {text}: {error.why}", 2) from None
    return found


def trace_of(given: argparse.Namespace) -> Trace | None:
    try:
        return read_trace(given.trace) if given.trace else None
    except ValueError as error:
        raise NotPossible(f"--trace {error}", 2) from None


def strategies(text: str | None) -> list[Strategy]:
    """Those that were asked for. Raises `NotPossible`."""
    if text is None:
        return [one for one in Strategy if one is not Strategy.COVERED]
    unknown = [word for word in text.split(",") if word not in tuple(Strategy)]
    if unknown:
        raise NotPossible(f"--strategy {unknown[0] or repr(text)}: there are: {', '.join(Strategy)}", 2)
    return list(dict.fromkeys(Strategy(word) for word in text.split(",")))


def sweep_of(text: str) -> tuple[str, list[float]]:
    """What is changed, and its values. Raises `NotPossible`."""
    name, sign, values = text.partition("=")
    if name not in SWEEPS or not sign:
        raise NotPossible(f"--sweep {text or repr(text)}: give NAME=V,V,... with a name of: {', '.join(SWEEPS)}", 2)
    known = {each.name: each.per_1000_node_days for each in RATES} if name == "rate" else {}
    return name, [known[one] if one in known else number("--sweep", text, one) for one in values.split(",")]
