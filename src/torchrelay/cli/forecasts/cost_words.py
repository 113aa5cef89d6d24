"""Words of `torchrelay cost`: a flag for every assumption, with its default, its unit and its source."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchrelay.cli.forecasts.numbers import amount_in, whole_number
from torchrelay.economics.assumptions import ASSUMPTIONS, Assumption, Inputs
from torchrelay.economics.formulas.rates import Counting
from torchrelay.economics.published.field import RATES, published_rate
from torchrelay.economics.published.published import nearest
from torchrelay.terminal.show import Output

ABOUT = """What failures cost, what migration saves, and what that depends on.

Never one number: the headline as it is published; against a tuned baseline; with your own measured coverage and
recovery (--ledger or --run-dir); each net of spares. Ask for the rate of failures first: published ones differ by 20.
"""
EXAMPLES = """
torchrelay cost                                          the published case, and what becomes of it
torchrelay cost --gpus 4096 --rate llama3 --plot cost.png
torchrelay cost --ledger ledger.jsonl --gpus 512         with what your own run has measured
torchrelay cost --advise --run-dir torchrelay-runs/17    how far checkpoints can be thinned
torchrelay cost --preset all                             published figures, and what makes each fail
torchrelay cost --list                                   which there are
torchrelay cost --assumptions                            all inputs as a table

Exit code: 0: done; 2: an input cannot be, and which.
"""
USAGE = (
    "torchrelay cost [--preset NAME | --list | --assumptions | --advise]\n"
    "                       [--ledger FILE | --run-dir DIR [--job JOB] | --clean N --eligible N]\n"
    "                       [ASSUMPTIONS] [--plot FILE] [-o {table,json}]"
)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchrelay cost",
        usage=USAGE,
        description=ABOUT,
        epilog=EXAMPLES,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    asked = parser.add_argument_group("what is asked").add_mutually_exclusive_group()
    asked.add_argument("--preset", metavar="NAME", help="a published figure worked through, or all of them: all")
    asked.add_argument("--list", action="store_true", help="the published figures")
    asked.add_argument("--assumptions", action="store_true", help="all inputs: value, unit, default, source")
    asked.add_argument("--advise", action="store_true", help="how far checkpoints can be thinned, and the risk")
    seen = parser.add_argument_group("what was measured")
    where = seen.add_mutually_exclusive_group()
    where.add_argument(
        "--ledger", type=Path, metavar="FILE", help="the ledger.jsonl of a run (torchrelay report --write)"
    )
    where.add_argument("--run-dir", type=Path, help="a run's folder: its ledger, as torchrelay report has it")
    where.add_argument("--clean", type=int, metavar="N", help="failures that were resolved clean, of --eligible")
    seen.add_argument("--eligible", type=int, metavar="N", help="failures that count")
    seen.add_argument("--job", help="with --run-dir: the job (the newest of the run)")
    made = parser.add_argument_group("assumptions (default; source)")
    for each in ASSUMPTIONS:
        add_assumption(made, each)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="cost over the rate of failures (PNG, SVG or PDF)")
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


def add_assumption(group: argparse._ArgumentGroup, each: Assumption) -> None:
    """A flag without a default of its own, so that it is seen which were given."""
    text = f"{each.what} ({default_text(each)}; {each.source})".replace("%", "%%")
    sign = (each.unit.split()[0] if each.unit else "HOW").upper().replace("$", "DOLLARS")
    if each.field == "rate":
        group.add_argument(each.flag, type=rate, metavar="RATE", help=text)
    elif each.field == "counting":
        group.add_argument(each.flag, type=Counting, choices=list(Counting), metavar="{wall,running}", help=text)
    else:
        counts = each.field in ("gpus", "gpus_per_node")
        group.add_argument(each.flag, type=whole_number if counts else amount_in(each.unit), metavar=sign, help=text)


def default_text(each: Assumption) -> str:
    """The default with its unit."""
    value = getattr(Inputs(), each.field)
    if value is None:
        return each.unset
    if isinstance(value, str):
        return str(value)
    return f"${value:g}" if each.unit == "$" else f"{value:.4g} {each.unit}"


def rate(text: str) -> float:
    """A number, or a published rate by its name."""
    found = published_rate(text)
    if found is not None:
        return found.per_1000_node_days
    try:
        return float(text)
    except ValueError:
        names = tuple(each.name for each in RATES)
        raise argparse.ArgumentTypeError(f"{text!r} is no number and no published rate{nearest(text, names)}") from None


def given_by(given: argparse.Namespace) -> dict[str, object]:
    """The assumptions that were given, by field."""
    values = {each.field: getattr(given, each.field) for each in ASSUMPTIONS}
    return {field: value for field, value in values.items() if value is not None}
