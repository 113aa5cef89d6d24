"""Mutant: one text of torchrelay that is replaced by another."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A proof that is taken out."""

    name: str
    file: str  # below src/torchrelay
    old: str
    new: str
    tests: tuple[str, ...]  # what pytest is to run: at least one of them fails

    def __str__(self) -> str:
        return self.name
