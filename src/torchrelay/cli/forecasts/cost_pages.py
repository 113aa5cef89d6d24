"""Pages of `torchrelay cost`: the answer, the presets, the assumptions and the advice, as tables."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from torchrelay.cli.forecasts.cost_inputs import Used
from torchrelay.economics.advice import Advice, Option
from torchrelay.economics.calculator import Answer, AtRate, View
from torchrelay.economics.published.claims import Claim, Figure, dollars, proven
from torchrelay.terminal.show import clip, milliseconds, table

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
    rows = [
        (each.flag, value_text(each), "given" if each.given == "you" else clip(each.source, 70)) for each in used
    ]  # fmt: skip
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
    low, share = proven(advice.coverage_low), proven(advice.coverage)
    head = (
        f"a failure every {advice.mttf_h:.3g} h, {advice.save_s:g} s a save, recovery in "
        f"{milliseconds(1000 * advice.recovery_s)}; back to a checkpoint: {advice.rollbacks:.3g} times over "
        f"the horizon at the measured ratio, {advice.rollbacks_low:.3g} at the lower bound"
    )
    choices = table(
        ("", "checkpoint", "every", "against none covered", "saves a day", f"ETTR at {share}", f"at {low}", "at 0 %",
         "lost by a rollback", "at worst"),
        [option_row(option) for option in advice.options],
    )  # fmt: skip
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
