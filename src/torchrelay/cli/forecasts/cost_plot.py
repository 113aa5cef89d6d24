"""The cost of failures over their rate: published rates differ by a factor of 20, and so does every figure."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from torchrelay.client.runs import NotPossible
from torchrelay.economics.assumptions import Inputs
from torchrelay.economics.calculator import Answer, AtRate, at_rate
from torchrelay.economics.published.claims import Known
from torchrelay.economics.published.field import RATES, Rate

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
