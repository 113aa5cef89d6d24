"""`torchrelay cost`: what failures cost and what migration saves; published figures; advice on checkpoints."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from torchrelay.cli.forecasts.cost_words import default_text, given_by, parser
from torchrelay.cli.forecasts.numbers import blame_flag
from torchrelay.client.client import Client
from torchrelay.client.runs import NotPossible, find_source
from torchrelay.economics.advice import Advice, Option, advice_line, advise
from torchrelay.economics.assumptions import ASSUMPTIONS, Inputs
from torchrelay.economics.calculator import Answer, AtRate, View, at_rate, work_out
from torchrelay.economics.formulas.rates import Unreasonable
from torchrelay.economics.measured import Measured, counted, measure
from torchrelay.economics.published.claims import Claim, Figure, Known, dollars, proven_share
from torchrelay.economics.published.field import RATES, Rate
from torchrelay.economics.published.published import all_claims, claim
from torchrelay.goodput.ledger import Line
from torchrelay.terminal.show import Output, clip, milliseconds, remark, show_json, table
from torchrelay.terminal.typed import joined

BAD = 2


def cost(words: list[str]) -> int:
    """Answer. Returns the exit code. Raises `NotPossible`."""
    words = joined(words)
    given = parser().parse_args(words)
    try:
        return answered(given)
    except Unreasonable as error:
        raise NotPossible(blame_flag(error, f"--{error.name.replace('_', '-')}", words), BAD) from None


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
    found_answer = work_out(inputs, measured)
    if given.plot:
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
            flag=each.flag,
            value=getattr(inputs, each.field),
            unit=each.unit,
            default=default_text(each),
            given="you" if each.field in given else "default",
            source=each.source,
            what=each.what,
        )
        for each in ASSUMPTIONS
    )


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

        source, note = find_source(given.run_dir)
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


# ---------------------------------------------------------------- plot

# Published rates differ by a factor of 20, and so does every figure.

POINTS = 60
LOWEST, HIGHEST = 0.8, 32.0  # failures per 1,000 node-days
NEAR = 1.05  # so near to the next lower one, a mark goes to the other side of its line


def curve(inputs: Inputs, answer: Answer) -> list[AtRate]:
    """The job of the inputs at rates evenly spaced on a logarithmic scale."""
    ratio = (HIGHEST / LOWEST) ** (1 / (POINTS - 1))
    rates = [Rate(name="", per_1000_node_days=LOWEST * ratio**at, source="", how="") for at in range(POINTS)]
    return [at_rate(inputs, answer.measured, rate) for rate in rates]


def plot(answer: Answer, path: Path) -> None:
    """Draw it. Raises `NotPossible`."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed to write a file
    import matplotlib.pyplot as plt

    inputs = replace(answer.inputs, mttf_h=None)
    found = curve(inputs, answer)
    rates = [each.rate.per_1000_node_days for each in found]
    figure, axes = plt.subplots(figsize=(10, 6))
    for name, field, style in (
        ("restart as published, linear formula", "headline_dollars", "--"),
        ("restart untuned, renewal form, saves charged", "untuned_dollars", "-"),
        ("restart, tuned", "tuned_dollars", "-"),
        ("migration, " + ("measured" if answer.measured else "90 % covered" if inputs.promised_coverage == 0.9
                          else "as promised"), "migration_dollars", "-"),
    ):  # fmt: skip
        axes.plot(rates, [getattr(each, field) / 1000 for each in found], style, label=name)
    whole = inputs.gpus * inputs.horizon_h * inputs.price_per_gpu_hour  # the linear formula loses more than there is
    top = 1.05 * min(whole, found[-1].headline_dollars) / 1000
    for rate, next_lower in zip(RATES, [*RATES[1:], None], strict=True):
        axes.axvline(rate.per_1000_node_days, color="0.85", linewidth=1, zorder=0)
        mark = rate.name if rate.known is Known.PUBLISHED else f"{rate.name} ({rate.known})"
        near = next_lower is not None and rate.per_1000_node_days < NEAR * next_lower.per_1000_node_days
        axes.text(rate.per_1000_node_days, top * 0.985, mark, rotation=90, va="top", ha="left" if near else "right",
                  fontsize=7, color="0.4")  # fmt: skip
    axes.set(xscale="log", xlim=(LOWEST, HIGHEST), ylim=(0, top), xlabel="failures per 1,000 node-days",
             ylabel=f"cost over {inputs.horizon_h:g} h, thousand $")  # fmt: skip
    axes.set_title(
        f"{inputs.gpus:,.0f} GPUs at ${inputs.price_per_gpu_hour:g}; spares left out; lines: published rates"
    )
    axes.set_xticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    axes.legend(loc="center left")
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise NotPossible(f"--plot {path}: {error.strerror or error}", 2) from None
    finally:
        plt.close(figure)


# ---------------------------------------------------------------- pages

# Pages of `torchrelay cost`: the answer, the presets, the assumptions and the advice, as tables.

WIDTH = 118
HOURS_A_MONTH = 730.0


# ---------------------------------------------------------------- the answer


def answer_page(answer: Answer, used: Sequence[Used]) -> str:
    """All of it; the inputs that were given are named, the rest is in --assumptions."""
    cluster = answer.cluster
    span = "a month" if cluster.horizon_h == HOURS_A_MONTH else f"{cluster.horizon_h:g} h"
    head = (
        f"{cluster.gpus:,.0f} GPUs at ${cluster.price_per_gpu_hour:g} an hour, a failure every {cluster.mttf_h:.3g} h, "
        f"{span}; dollars are over that time"
    )
    views = table(
        ("view", "lost h a day", "ETTR", "restart", "migration", "saved", "spares", "net of spares", "which is"),
        [view_row(view) for view in answer.views],
    )
    formula = table(("headline", "formula", "with its numbers"), answer.formula)
    rates = table(
        (
            "published rate",
            "per 1,000 node-days",
            "M",
            "headline",
            "untuned",
            "tuned",
            "migration",
            "saved",
            "which is",
        ),
        [rate_row(at_rate) for at_rate in answer.rates],
    )
    parts = [head, views, formula, f"the same job at the published rates, spares left out\n{rates}",
             inputs_text(used), notes(answer.remarks)]  # fmt: skip
    return "\n\n".join(parts)


def view_row(view: View) -> tuple[object, ...]:
    """Restart and migration side by side: before > after."""
    one, other = view.restart_bill, view.migration_bill
    return (
        view.name,
        f"{one.lost_h_per_day:.2f} > {other.lost_h_per_day:.2f}",
        f"{one.ettr:.3f} > {other.ettr:.3f}",
        dollars(one.lost_dollars),
        dollars(other.lost_dollars),
        dollars(view.saved_dollars),
        f"{dollars(one.spare_dollars)} | {dollars(other.spare_dollars)}",
        dollars(view.net_dollars),
        view.what,
    )


def rate_row(found: AtRate) -> tuple[object, ...]:
    return (
        found.rate.name,
        f"{found.rate.per_1000_node_days:.2f}",
        f"{found.mttf_h:.3g} h",
        dollars(found.headline_dollars),
        dollars(found.untuned_dollars),
        dollars(found.tuned_dollars),
        dollars(found.migration_dollars),
        dollars(found.saved_dollars),
        clip(f"{found.rate.source}: {found.rate.how}", 70),
    )


def inputs_text(used: Sequence[Used]) -> str:
    """Every input with its value and its source."""
    rows = [(each.flag, value_text(each), "given" if each.given == "you" else clip(each.source, 70)) for each in used]
    return table(("input", "value", "source"), rows)


def value_text(used: Used) -> str:
    """A value with its unit; what stands for one that has no default."""
    if used.value is None:
        return used.default
    if isinstance(used.value, str):
        return str(used.value)
    return f"${used.value:g}" if used.unit == "$" else f"{used.value:.4g} {used.unit}"


def assumptions_page(used: Sequence[Used]) -> str:
    """All inputs."""
    rows = [(each.flag, value_text(each), each.default, each.given, each.source, each.what) for each in used]
    return table(("input", "value", "default", "given by", "source of the default", "what it is"), rows)


def notes(remarks: Sequence[str]) -> str:
    """Remarks, a dash before each."""
    return "\n".join(textwrap.fill(remark, WIDTH, initial_indent="- ", subsequent_indent="  ") for remark in remarks)


# ---------------------------------------------------------------- published figures


def list_page(claims: Sequence[Claim]) -> str:
    """One line each."""
    rows = [(each.name, each.figures[0].text, each.verdict, each.says, clip(each.source, 50)) for each in claims]
    return table(("preset", "figure", "verdict", "what is claimed (in our words)", "source"), rows)


def claims_page(claims: Sequence[Claim]) -> str:
    """Each worked through, and what makes it fail."""
    return "\n\n".join(claim_text(each) for each in claims)


def claim_text(claim: Claim) -> str:
    """A claim: what it says, its figure with the numbers, and the figures under other assumptions."""
    head = [
        f"{claim.name}: {', '.join(each.text for each in claim.figures)}  [{claim.verdict}]",
        f"  claimed   {claim.says}",
        f"  source    {claim.source} ({claim.known}; in our words)",
        f"  inputs    {'; '.join(f'{name}: {value}' for name, value in claim.inputs.items())}",
        *worked_lines(claim.figures),
        f"  needs     {claim.needs}",
        "  fails if",
    ]
    rows = [(f"    {each.without}", each.figure.text, each.figure.worked.rpartition(" = ")[0]) for each in claim.fails]
    return "\n".join([*head, table(("    assumption in its place", "figure then", "how"), rows)])


def worked_lines(figures: Sequence[Figure]) -> list[str]:
    """Each formula once, and the figures that it gives."""
    lines, last = [], ""
    for each in figures:
        if each.formula != last:
            lines.append(f"  formula   {each.formula}")
        lines.append(f"            {each.worked}")
        last = each.formula
    return lines


# ---------------------------------------------------------------- advice


def advice_page(advice: Advice, line: str) -> str:
    """The advice, the choices beside it, the numbers behind it, the risk."""
    low, share = proven_share(advice.coverage_low), proven_share(advice.coverage)
    head = (
        f"a failure every {advice.mttf_h:.3g} h, {advice.save_s:g} s a save, recovery in "
        f"{milliseconds(1000 * advice.recovery_s)}; back to a checkpoint: {advice.rollbacks:.3g} times over "
        f"the horizon at the measured ratio, {advice.rollbacks_low:.3g} at the lower bound"
    )
    choices = table(
        (
            "",
            "checkpoint",
            "every",
            "against none covered",
            "saves a day",
            f"ETTR at {share}",
            f"at {low}",
            "at 0 %",
            "lost by a rollback",
            "at worst",
        ),
        [option_row(option) for option in advice.options],
    )
    return "\n\n".join([line, head, choices, f"why\n{notes(advice.reasons)}", f"risk\n{notes(advice.risks)}"])


def option_row(option: Option) -> tuple[object, ...]:
    return (
        ">" if option.advised else "",
        option.name,
        f"{option.interval_h:.3g} h",
        f"{option.thinner:.2f} x",
        f"{option.saves_a_day:.1f}",
        f"{option.ettr_measured:.4f}",
        f"{option.ettr_low:.4f}",
        f"{option.ettr_none:.4f}",
        f"{option.rollback_mean_h:.3g} h",
        f"{option.rollback_worst_h:.3g} h",
    )


# ---------------------------------------------------------------- what is asked for

# The assumptions of `torchrelay cost` as they are shown.


class Used(Struct, frozen=True, kw_only=True):
    """An assumption as it is used."""

    flag: str
    value: Any
    unit: str
    default: str
    given: str  # by whom
    source: str
    what: str
