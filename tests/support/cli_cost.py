"""What tests of cli cost share."""

from __future__ import annotations

import pytest

from tests.support.cli_views import journal_of_a_recovery, torchrelay  # noqa: F401

Capsys = pytest.CaptureFixture[str]


def refused(capsys: Capsys, *words: str) -> str:
    code, out, err = torchrelay(capsys, "cost", *words)
    assert (code, out) == (2, "")
    return err
