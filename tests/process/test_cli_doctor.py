"""`torchrelay doctor`: each finding that is not well ends in what to do, and the exit code says how bad it is."""

from __future__ import annotations

from tests.support.cli_doctor import (
    only,
    without_torch,  # noqa: F401  a fixture
)
from torchrelay.cli.diagnose.consult import (
    State,
    check_torch,
    probe_torch,
)


def test_here_torch_and_gloo_work() -> None:
    found = probe_torch()
    assert "error" not in found
    checks = list(check_torch(found))
    assert {only(checks, name).state for name in ("torch", "gloo")} == {State.WELL}
    assert only(checks, "communicator swap").found in ("compiled extension", "fresh backend type")
