"""Passes: both ends of a connection are of the same job, and each is in the role that it says."""

from __future__ import annotations

import socket
import ssl
import threading
from base64 import b64encode
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from torchrelay.wire.trust.authority import Authority, make_passes
from torchrelay.wire.trust.passes import (
    Pass,
    Role,
    client_context,
    pass_of,
    read_pass,
    role_in,
    server_context,
    write_pass,
)
from torchrelay.wire.trust.trust import TrustError


def meet(listens: Path, comes: Path | None, name: str = Role.ORCHESTRATOR.server_name) -> tuple[Role | None, str]:
    """Two ends shake hands: the role that the listening one sees, and why it did not come to that."""
    near, far = socket.socketpair()
    seen: list[Role | None] = []
    why: list[str] = []

    def listen() -> None:
        try:
            with near, server_context(listens).wrap_socket(near, server_side=True) as end:
                seen.append(role_in(end.getpeercert()))
                end.sendall(b"welcome")
        except OSError as error:
            why.append(str(error))

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        if comes is None:
            context = ssl.create_default_context(cadata=read_pass(listens).authority)
        else:
            context = client_context(comes)
        with far, context.wrap_socket(far, server_hostname=name) as end:
            end.recv(7)
    except OSError as error:
        why.append(str(error))
    thread.join(10)
    return (seen[0] if seen else None), "; ".join(why)


@pytest.mark.parametrize("role", [Role.AGENT, Role.OPERATOR, Role.VIEWER])
def test_each_role_is_seen_as_what_it_is(tmp_path: Path, role: Role) -> None:
    passes = make_passes(tmp_path, "train")
    assert meet(passes[Role.ORCHESTRATOR], passes[role]) == (role, "")


def test_a_pass_of_another_job_of_the_same_name_is_refused_by_both(tmp_path: Path) -> None:
    ours, theirs = make_passes(tmp_path / "a", "train"), make_passes(tmp_path / "b", "train")
    seen, why = meet(ours[Role.ORCHESTRATOR], theirs[Role.AGENT])
    assert seen is None
    assert "verify failed" in why


def test_without_a_certificate_nobody_comes_in(tmp_path: Path) -> None:
    passes = make_passes(tmp_path, "train")
    seen, why = meet(passes[Role.ORCHESTRATOR], None)
    assert seen is None
    assert "certificate" in why


@pytest.mark.parametrize("expired", [Role.ORCHESTRATOR, Role.AGENT])
def test_an_expired_one_is_refused(tmp_path: Path, expired: Role) -> None:
    long_ago = datetime.now(UTC) - timedelta(days=10)
    authority, passes = Authority("train", now=long_ago), {}
    for role in (Role.ORCHESTRATOR, Role.AGENT):
        days = 5 if role is expired else 20
        passes[role] = write_pass(tmp_path / f"{role}.pem", authority.issue(role, days=days))
    seen, why = meet(passes[Role.ORCHESTRATOR], passes[Role.AGENT])
    assert seen is None
    assert "expired" in why


def test_an_agent_cannot_pose_as_the_orchestrator(tmp_path: Path) -> None:
    passes = make_passes(tmp_path, "train")
    seen, why = meet(passes[Role.AGENT], passes[Role.OPERATOR])
    assert "purpose" in why or "mismatch" in why.lower()
    assert seen is None or "welcome" not in why


def test_a_pass_is_for_its_owner_and_says_nothing_of_itself(tmp_path: Path) -> None:
    passes = make_passes(tmp_path, "train")
    for role, path in passes.items():
        assert path == pass_of(tmp_path, role)
        assert path.stat().st_mode & 0o777 == 0o600
        held = read_pass(path)
        assert held.token not in repr(held)
        assert held.key not in repr(held)
    assert len({read_pass(path).token for path in passes.values()}) == len(Role)
    passes[Role.AGENT].chmod(0o640)
    with pytest.raises(TrustError, match="chmod 600"):
        read_pass(passes[Role.AGENT])


@pytest.mark.parametrize("missing", ["certificate", "key", "authority", "token"])
def test_what_is_no_pass_is_refused_with_the_remedy(tmp_path: Path, missing: str) -> None:
    whole = read_pass(make_passes(tmp_path, "train")[Role.AGENT])
    part = b64encode(whole.token.encode()).decode() if missing == "token" else getattr(whole, missing)
    text = whole.text().replace(part, "")
    path = tmp_path / "cut.pem"
    path.touch(mode=0o600)
    path.write_text(text)
    with pytest.raises(TrustError, match="Copy one from the folder"):
        read_pass(path)


def test_a_damaged_certificate_is_refused_with_the_remedy(tmp_path: Path) -> None:
    held = read_pass(make_passes(tmp_path, "train")[Role.AGENT])
    broken = Pass(held.certificate.replace("M", "N"), held.key, held.authority, held.token)
    with pytest.raises(TrustError, match="usable certificate"):
        client_context(write_pass(tmp_path / "broken.pem", broken))
