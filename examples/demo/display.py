"""Display: a run as it happens; a moving picture on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

BARS = "▁▂▃▄▅▆▇█"
PLAIN_EVERY = 25  # steps between two plain lines
COLOURS = {
    "computing": "green",
    "gate": "green",
    "updating": "green",
    "between": "green",
    "section": "cyan",
    "stopped": "yellow",
    "fencing": "red",
    "vacant": "red",
    "hanging": "red",
}


@dataclass(frozen=True, slots=True)
class Moment:
    """What is to be seen of a run now.

    ranks    (rank, state, process id) in order of rank
    losses   of rank 0, oldest first
    news     lines about strikes and incidents since the beginning; it only grows
    """

    title: str
    step: int
    total: int
    seconds: float
    phase: str
    losses: Sequence[float] = ()
    ranks: Sequence[tuple[int, str, int | None]] = ()
    spares: int = 0
    news: Sequence[str] = field(default_factory=tuple)


class Display(Protocol):
    """Shows moments. Used as a context, so that the terminal is put right whatever happens."""

    def show(self, moment: Moment) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def display_on(console: Console) -> Display:
    """The display that fits this console."""
    return Picture(console) if console.is_terminal else Lines(console)


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as a row of bars, averaged to at most `width` of them, from their least to their greatest."""
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    cells = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    means = [sum(cell) / len(cell) for cell in cells]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BARS[round((mean - low) / span * (len(BARS) - 1))] for mean in means)


class Picture:
    """On a terminal: a bar of steps, the loss, the ranks and what they do, and what happened."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live = Live(console=console, refresh_per_second=8, transient=False)

    def show(self, moment: Moment) -> None:
        self.live.update(self.draw(moment))

    def draw(self, moment: Moment) -> RenderableType:
        head = Table.grid(padding=(0, 1))
        head.add_row(
            Text(moment.title, style="bold"),
            ProgressBar(total=moment.total, completed=moment.step, width=40),
            f"step {moment.step} of {moment.total}",
            f"{moment.seconds:.0f} s",
            Text(moment.phase, style="yellow" if moment.phase != "running" else "green"),
        )
        parts: list[RenderableType] = [head]
        if moment.losses:
            bars = sparkline(moment.losses, min(60, self.console.width - 20))
            parts.append(Text(f"loss {bars} {moment.losses[-1]:.3f}"))
        if moment.ranks:
            parts.append(self.draw_ranks(moment))
        parts += [Text(f"  {line}", style="red" if line.startswith("strike") else "") for line in moment.news]
        return Group(*parts)

    def draw_ranks(self, moment: Moment) -> Text:
        row = Text("ranks ")
        for rank, state, pid in moment.ranks:
            row.append(f" {rank} {state:<9}", style=COLOURS.get(state, "dim"))
            row.append(f" {pid or '-':<8}", style="dim")
        return row.append(f" spares {moment.spares}")

    def __enter__(self) -> Self:
        self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.stop()


class Lines:
    """Elsewhere: a line every few steps, and each piece of news once."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.told = 0
        self.next_step = 0

    def show(self, moment: Moment) -> None:
        for line in moment.news[self.told :]:
            self.say(f"[{moment.title}] {line}")
        self.told = len(moment.news)
        if moment.step >= self.next_step and moment.losses:
            self.say(
                f"[{moment.title}] step {moment.step} of {moment.total}, {moment.seconds:.0f} s, "
                f"loss {moment.losses[-1]:.3f}"
            )
            self.next_step = moment.step - moment.step % PLAIN_EVERY + PLAIN_EVERY

    def say(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None
