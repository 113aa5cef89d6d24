"""Blame: an exception that ends a script is shown as the script wants it."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from torchrelay.worker.agreement.blame import print_for_people


def raised() -> ValueError:
    try:
        raise ValueError("of the script")
    except ValueError as error:
        return error


def test_the_scripts_own_hook_is_asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(sys, "excepthook", lambda *told: seen.append(told))
    error = raised()
    print_for_people(error, "what to do")
    assert [(kind, value) for kind, value, _ in seen] == [(ValueError, error)]
    assert capsys.readouterr().err == "what to do\n"


def test_without_one_it_is_as_python_prints_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # and not that of torch
    print_for_people(raised())
    told = capsys.readouterr().err
    assert told.startswith("Traceback (most recent call last):")
    assert told.endswith("ValueError: of the script\n")


def test_a_hook_that_fails_hides_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def hook(*_: object) -> None:
        raise RuntimeError("of the hook")

    monkeypatch.setattr(sys, "excepthook", hook)
    print_for_people(raised())
    told = capsys.readouterr().err
    assert "RuntimeError: of the hook" in told
    assert "ValueError: of the script" in told
