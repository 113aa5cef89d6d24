"""Listing: a view of something that is listed, as a table for people and as JSON; all list verbs are made of these."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torchrelay.client.runs import Source, find_source
from torchrelay.terminal.show import Output, remark, show, show_json, table

F = TypeVar("F")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Column(Generic[R]):
    """A column: its header, and how the field of a row is shown below it."""

    head: str
    cell: Callable[[R], object]


@dataclass(frozen=True, slots=True)
class View(Generic[F, R]):
    """A list.

    fetch     gets what is listed, with all that is shown around it
    rows      the rows of that
    empty     what is said if there are none; None: the bare headers
    below     what follows the table
    bare      as JSON it is the rows alone
    """

    verb: str
    fetch: Callable[[argparse.Namespace], F]
    rows: Callable[[F], Sequence[R]]
    columns: tuple[Column[R], ...]
    empty: Callable[[F], str] | None = None
    below: Callable[[F], Iterable[str]] = lambda _: ()
    bare: bool = False

    def page(self, found: F) -> str:
        """The list for people."""
        rows = self.rows(found)
        if not rows and self.empty is not None:
            return self.empty(found)
        cells = [[column.cell(row) for column in self.columns] for row in rows]
        return "\n".join([table([column.head for column in self.columns], cells), *self.below(found)])

    def json(self, found: F) -> str:
        """The list for programs."""
        return show_json(self.rows(found) if self.bare else found)

    def show(self, given: argparse.Namespace) -> None:
        """Print the list as it was asked for, once or again and again."""

        def page() -> str:
            found = self.fetch(given)
            return self.json(found) if given.output is Output.JSON else self.page(found)

        show(page, watch=getattr(given, "watch", False))


def from_run(view: Callable[[Source, str | None], F]) -> Callable[[argparse.Namespace], F]:
    """Fetches a view of a run, from its orchestrator or its journal; a remark says if not all is well with it."""

    def fetch(given: argparse.Namespace) -> F:
        source, note = find_source(given.run_dir)
        remark(note)
        return view(source, getattr(given, "job", None))

    return fetch
