"""`torchrelay taint`, `drain`, `cordon`, and their opposites: places that should be left, or not be used."""

from __future__ import annotations

import argparse
from typing import Any

from torchrelay.cli.operate.changing import ask_and_do, place_in
from torchrelay.client.runs import NotPossible, time_in
from torchrelay.terminal.words import EFFECTS


def taint(given: argparse.Namespace) -> None:
    """Hold something against a place."""
    body = place_in(given.place) | taint_in(given.taint) | {"reason": given.reason}
    if given.ttl is not None:
        body["ttl_ms"] = time_in(given.ttl)
    post(given, body)


def untaint(given: argparse.Namespace) -> None:
    """Lift a taint."""
    post(given, place_in(given.place) | {"key": given.key, "healed": given.healed})


def drain(given: argparse.Namespace) -> None:
    """Empty a place."""
    post(given, place_in(given.place) | {"reason": given.reason})


def undrain(given: argparse.Namespace) -> None:
    """A drained place may be used again."""
    post(given, place_in(given.place))


def cordon(given: argparse.Namespace) -> None:
    """Nothing new is put on a place."""
    post(given, place_in(given.place) | {"reason": given.reason})


def uncordon(given: argparse.Namespace) -> None:
    """A place that was cordoned or drained may be used again."""
    post(given, place_in(given.place))


def post(given: argparse.Namespace, body: dict[str, Any]) -> None:
    ask_and_do(given.run_dir, f"/v1/{given.verb}", body, yes=given.yes, dry_run=given.dry_run, output=given.output)


def taint_in(text: str) -> dict[str, Any]:
    """KEY[=VALUE][:EFFECT] as the API takes it. Raises `NotPossible`."""
    rest, colon, effect = text.partition(":")
    key, _, value = rest.partition("=")
    known = {name.lower(): name for name in EFFECTS}
    if not key or (colon and effect.lower() not in known):
        raise NotPossible(f"{text!r} is no taint: give KEY[=VALUE][:EFFECT], effects: {', '.join(EFFECTS)}", 2)
    return {"key": key, "value": value, "effect": known[effect.lower()] if colon else EFFECTS[0]}
