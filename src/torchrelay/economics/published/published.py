"""Published figures as presets: each is worked out anew from its inputs, never stored."""

from __future__ import annotations

import difflib

from torchrelay.economics.formulas.rates import Unreasonable
from torchrelay.economics.published.claims import Claim
from torchrelay.economics.published.published_costs import COSTS
from torchrelay.economics.published.published_times import TIMES


def all_claims() -> tuple[Claim, ...]:
    """All presets, those in dollars first."""
    return tuple(make() for make in (*COSTS, *TIMES))


def claim(name: str) -> Claim:
    """One preset by its name. Raises `Unreasonable`, naming the nearest."""
    known = {each.name: each for each in all_claims()}
    if name in known:
        return known[name]
    raise Unreasonable("preset", f"no preset is called {name!r}{nearest(name, tuple(known))}")


def nearest(name: str, known: tuple[str, ...]) -> str:
    """What may have been meant; all of them if nothing is near."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f": did you mean {near[0]!r}?" if near else f": there are {', '.join(known)}"
