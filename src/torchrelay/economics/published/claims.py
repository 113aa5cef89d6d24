"""Claim: a published figure, worked through from its inputs, and the assumptions without which it is another one."""

from __future__ import annotations

import math
from enum import StrEnum

from msgspec import Struct


class Known(StrEnum):
    """How we know of it."""

    PUBLISHED = "published"
    SECOND_HAND = "second-hand"  # told by somebody else; the original was not read
    UNVERIFIED = "unverified"  # the publication exists; its text was not read


class Verdict(StrEnum):
    """Whether the published figure comes out."""

    YES = "reproduces"
    ONLY_IF = "reproduces only under its assumption"
    NO = "does not reproduce"


class Unit(StrEnum):
    """What a figure is in; says how it is written, too."""

    DOLLARS_A_MONTH = "$ a month"
    DOLLARS_A_YEAR = "$ a year"
    HOURS = "h"
    HOURS_A_DAY = "h a day"
    MINUTES = "min"
    MINUTES_A_DAY = "min a day"
    SHARE = "%"
    BOUND = "%, at least"  # the lower end of an interval
    GPU_HOURS = "GPU-h"
    GPU_HOURS_A_YEAR = "GPU-h a year"
    GPU_HOURS_A_MONTH = "GPU-h a month"
    RATE = "failures per 1,000 node-days"


class Figure(Struct, frozen=True, kw_only=True):
    """A number, and how it was got: the formula, and the formula with the numbers in it. Shares are from 0 to 1."""

    value: float
    unit: Unit
    formula: str
    worked: str
    text: str = ""  # as people write it; filled in by `figure`


class Otherwise(Struct, frozen=True, kw_only=True):
    """An assumption that a claim rests on, as it is without it, and the figure then."""

    without: str
    figure: Figure


class Claim(Struct, frozen=True, kw_only=True):
    """What was published, in our words, and what becomes of it. The first figure is the one that was published."""

    name: str
    says: str
    source: str
    known: Known
    verdict: Verdict
    needs: str  # the assumption under which it comes out
    inputs: dict[str, str]
    figures: tuple[Figure, ...]
    fails: tuple[Otherwise, ...]


def figure(value: float, unit: Unit, formula: str, worked: str) -> Figure:
    """A figure with its text; that is added to the end of `worked`."""
    text = written(value, unit)
    return Figure(value=value, unit=unit, formula=formula, worked=f"{worked} = {text}", text=text)


def written(value: float, unit: Unit) -> str:
    """A figure as people write it: $307,524 a month, 3.04 h a day, 95.0 %."""
    match unit:
        case Unit.DOLLARS_A_MONTH | Unit.DOLLARS_A_YEAR:
            return f"{dollars(value)} {unit.removeprefix('$ ')}"
        case Unit.SHARE:
            return percent(value)
        case Unit.BOUND:
            return proven_share(value)
        case Unit.GPU_HOURS | Unit.GPU_HOURS_A_MONTH | Unit.GPU_HOURS_A_YEAR:
            return f"{value / 1e6:.2f} M {unit}" if value >= 1e6 else f"{value:,.0f} {unit}"
        case Unit.HOURS | Unit.HOURS_A_DAY | Unit.MINUTES | Unit.MINUTES_A_DAY | Unit.RATE:
            return f"{value:,.2f} {unit}"


def dollars(value: float) -> str:
    """$307,524; from a million on $6.35 M; a loss is -$1,200."""
    sign, size = ("-" if value < -0.5 else ""), abs(value)
    return f"{sign}${size / 1e6:,.2f} M" if size >= 1e6 else f"{sign}${size:,.0f}"


def proven_share(share: float, *, up: bool = False) -> str:
    """A share that was counted, or an end of its interval: to a tenth, away from what it would have to prove.

    So 89.97 % is not to be read as 90; the upper end goes `up`.
    """
    tenths = share * 1000
    rounded = math.ceil(tenths - 1e-9) if up else math.floor(tenths + 1e-9)
    return f"{rounded / 10:g} %" if rounded % 10 == 0 else f"{rounded / 10:.1f} %"


def percent(share: float) -> str:
    """95.0 %; two figures below one percent. For what was worked out; of what was counted see `proven`."""
    return f"{share:.2%}".replace("%", " %") if 0 < abs(share) < 0.01 else f"{share:.1%}".replace("%", " %")
