"""Consult: `torchrelay doctor`, of this machine, of its network, or of a job's layout."""

from __future__ import annotations

import argparse

from torchrelay.client.runs import NotPossible


def consult(given: argparse.Namespace) -> int:
    """Examine what was asked for. Returns the exit code; raises `NotPossible` for flags that mean nothing together."""
    if given.module and not given.script:
        raise NotPossible("-m: no module is named", 2)
    if given.layout:
        from torchrelay.cli.diagnose.layout import show_layout

        return show_layout(given)
    if given.script:
        raise NotPossible(f"{given.script[0]}: the doctor looks at a script with --layout only", 2)
    from torchrelay.cli.diagnose.doctor import all_checks, examine

    if given.net:
        from torchrelay.cli.diagnose.doctor_network import network_checks

        return examine(network_checks(), given.output)
    return examine(all_checks(), given.output)
