"""Files of a project that are named like modules of ours: they are the script's; no process of ours imports them."""

from __future__ import annotations

import re
from pathlib import Path

SOURCE = Path(__file__).parents[3] / "src"


def test_every_python_that_we_start_leaves_the_working_folder_out() -> None:
    started = [
        (path.relative_to(SOURCE).as_posix(), words)
        for path in sorted(SOURCE.rglob("*.py"))
        for words in re.findall(r"\[\s*sys\.executable,([^\]]*)", path.read_text())
    ]
    assert len(started) >= 5
    assert [where for where, words in started if not words.strip().startswith('"-P",')] == []
