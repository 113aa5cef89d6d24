"""`torchrelay cost`: what failures cost and what migration saves; published figures; advice on checkpoints."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from torchrelay.cli.forecasts.cost_inputs import Used
from torchrelay.cli.forecasts.cost_pages import advice_page, answer_page, assumptions_page, claims_page, list_page
from torchrelay.cli.forecasts.cost_words import default_text, given_by, parser
from torchrelay.cli.forecasts.numbers import blame
from torchrelay.client.client import Client
from torchrelay.client.runs import NotPossible, look
from torchrelay.economics.advice import advice_line, advise
from torchrelay.economics.assumptions import ASSUMPTIONS, Inputs
from torchrelay.economics.calculator import answer
from torchrelay.economics.formulas.rates import Unreasonable
from torchrelay.economics.measured import Measured, counted, measure
from torchrelay.economics.published.published import all_claims, claim
from torchrelay.goodput.ledger import Line
from torchrelay.terminal.show import Output, remark, show_json
from torchrelay.terminal.typed import joined

BAD = 2


def cost(words: list[str]) -> int:
    """Answer. Returns the exit code. Raises `NotPossible`."""
    words = joined(words)
    given = parser().parse_args(words)
    try:
        return answered(given)
    except Unreasonable as error:
        raise NotPossible(blame(error, f"--{error.name.replace('_', '-')}", words), BAD) from None


def answered(given: argparse.Namespace) -> int:
    """What is asked for, printed. Raises `NotPossible`, `Unreasonable`."""
    as_json = given.output is Output.JSON
    if given.list or given.preset:
        refuse_beside(given)
        found = all_claims() if given.list or given.preset == "all" else (claim(given.preset),)
        print(show_json(found) if as_json else list_page(found) if given.list else claims_page(found))
        return 0
    if given.rate is not None and given.mttf_h is not None:
        raise NotPossible("--rate and --mttf-h say the same thing: give one of them", BAD)
    inputs = inputs_of(given)
    if given.assumptions:
        refuse_measured(given)
        used = used_assumptions(inputs, given_by(given))
        print(show_json(used) if as_json else assumptions_page(used))
        return 0
    if given.plot:
        if given.advise:
            raise NotPossible("--plot shows the cost over the rate: leave --advise out", BAD)
        from torchrelay.cli.forecasts.simulate_plot import check_name

        check_name(given.plot)
    measured = measured_by(given)
    if given.advise:
        if measured is None:
            raise NotPossible(
                "--advise needs what was measured: --ledger FILE, --run-dir, or --clean and --eligible", BAD
            )
        found_advice = advise(inputs, measured)
        print(show_json(found_advice) if as_json else advice_page(found_advice, advice_line(found_advice)))
        return 0
    found_answer = answer(inputs, measured)
    if given.plot:
        from torchrelay.cli.forecasts.cost_plot import plot

        plot(found_answer, given.plot)
        remark(f"plotted to {given.plot}")
    used = used_assumptions(inputs, given_by(given))
    print(show_json({"answer": found_answer, "assumptions": used}) if as_json else answer_page(found_answer, used))
    return 0


def inputs_of(given: argparse.Namespace) -> Inputs:
    """The defaults, and what was given in their place. Raises `Unreasonable`."""
    return msgspec.structs.replace(Inputs(), **given_by(given))


def refuse_beside(given: argparse.Namespace) -> None:
    """A preset has its own inputs: others beside it would be ignored. Raises `NotPossible`."""
    beside = [f"--{name.replace('_', '-')}" for name in given_by(given)]
    beside += measured_flags(given)
    if beside:
        asked = "--list" if given.list else "--preset"
        raise NotPossible(f"{beside[0]} means nothing with {asked}: published figures have their own inputs", BAD)


def measured_flags(given: argparse.Namespace) -> list[str]:
    """What was given besides the assumptions."""
    names = ("ledger", "run_dir", "clean", "eligible", "plot", "job")
    return [f"--{name.replace('_', '-')}" for name in names if getattr(given, name) is not None]


def refuse_measured(given: argparse.Namespace) -> None:
    """The assumptions are not what was measured. Raises `NotPossible`."""
    if beside := measured_flags(given):
        raise NotPossible(f"{beside[0]} means nothing with --assumptions, which lists the inputs only", BAD)


def used_assumptions(inputs: Inputs, given: dict[str, object]) -> tuple[Used, ...]:
    """All of them, in the order of the flags."""
    return tuple(
        Used(
            flag=each.flag, value=getattr(inputs, each.field), unit=each.unit, default=default_text(each),
            given="you" if each.field in given else "default", source=each.source, what=each.what,
        )
        for each in ASSUMPTIONS
    )  # fmt: skip


# ---------------------------------------------------------------- what was measured


def measured_by(given: argparse.Namespace) -> Measured | None:
    """From a ledger, a run, or two numbers; None if nothing was. Raises `NotPossible`, `Unreasonable`."""
    if (given.clean is None) != (given.eligible is None):
        raise NotPossible("--clean and --eligible go together: N clean of M that count", BAD)
    if given.job is not None and given.run_dir is None:
        raise NotPossible("--job means nothing without --run-dir", BAD)
    if given.clean is not None:
        return counted(given.clean, given.eligible, "--clean and --eligible")
    if given.ledger is not None:
        return measure(read_ledger(given.ledger), str(given.ledger))
    if given.run_dir is not None:
        from torchrelay.client.ledger_file import ledger

        source, note = look(given.run_dir)
        remark(note)
        live = isinstance(source, Client)
        return measure(ledger(source.view_incidents(given.job)), str(given.run_dir), live=live)
    return None


def read_ledger(path: Path) -> tuple[Line, ...]:
    """The lines of a ledger.jsonl. Raises `NotPossible`, naming the line that is broken."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise NotPossible(f"--ledger {path}: {error.strerror or error}", BAD) from None
    decoder, lines = msgspec.json.Decoder(Line), []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            lines.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            message = (
                f"{path}, line {number}: {error}: not a line of a ledger; write it anew with torchrelay report --write"
            )
            raise NotPossible(message, BAD) from None
    return tuple(lines)
