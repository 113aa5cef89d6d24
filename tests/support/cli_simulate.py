"""What tests of cli simulate share."""

from __future__ import annotations

import pytest

from torchrelay.cli.main import main

SHORT = ("--gpus", "64", "--days", "5", "--rate", "30", "--repair", "5h,20h", "--runs", "2")


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """The exit code, stdout and stderr of the command."""
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *words])
    out, err = capsys.readouterr()
    code = ended.value.code
    assert isinstance(code, int)
    return code, out, err
