"""Equivalent mutants: changes that change nothing which matters, each with its reason. Nothing else may survive.

A line whose mutant is killed, or is not made any more, fails too.
"""

from __future__ import annotations

EQUIVALENT: dict[str, str] = {}
