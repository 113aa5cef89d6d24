"""Golden transcripts: an event, then the phase and the orders. `REWRITE=1` records them; the diff is reviewed.

Each file in `tests/transcripts` is a story for people. A command stands above `----`, what follows from it below; an
empty line ends it. Lines that begin with # are for the reader.

    job ranks=2 spares=1          submit a job; further fields are those of JobSpec
    node node-0 slots=3           a node joins; workers=a,b are those alive on it
    answer [Interrupt ...]        everybody does what is ordered (of these kinds), once; but=1 leaves rank 1 out
    settle                        ... until nothing more happens
    train 3                       all holders compute the step after point 3
    stand 1 committed=2 phase=gate pending=3     the holder of rank 1 stands elsewhere
    stand 0 keeps=True            ... and keeps copies of its wards' records
    lose 1 signal=9               the process of rank 1's holder ends (or of a worker, by its name)
    wait 250                      time passes, in ms
    EventName field=value         any event; rank=1 also says who, and in which generation
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.transcripts import FILES, retell


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_protocol_tells_the_same_story(path: Path) -> None:
    text = path.read_text()
    told = retell(text)
    if os.environ.get("REWRITE"):
        path.write_text(told)
    else:
        assert told == text


def test_there_are_transcripts() -> None:
    assert len(FILES) >= 10
