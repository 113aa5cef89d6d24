"""Secrets are proved, tokens are kept and compared with care, and neither shows in a log."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchrelay.wire.trust import trust

A, B = b"a" * trust.NONCE_BYTES, b"b" * trust.NONCE_BYTES
SECRET = b"s" * trust.SECRET_BYTES


def test_who_knows_the_secret_can_prove_it() -> None:
    assert trust.verify(SECRET, A, B, "server 3", trust.prove(SECRET, A, B, "server 3"))


@pytest.mark.parametrize(
    ("secret", "nonce_a", "nonce_b", "context"),
    [
        (b"x" * trust.SECRET_BYTES, A, B, "server 3"),
        (SECRET, B, A, "server 3"),
        (SECRET, A, A, "server 3"),
        (SECRET, A, B, "client 3"),
        (SECRET, A, B, "server 4"),
        (SECRET, A + b"b", B[1:], "server 3"),
    ],
)
def test_a_proof_serves_for_nothing_else(secret: bytes, nonce_a: bytes, nonce_b: bytes, context: str) -> None:
    proof = trust.prove(SECRET, A, B, "server 3")
    assert not trust.verify(secret, nonce_a, nonce_b, context, proof)
    assert not trust.verify(SECRET, A, B, "server 3", proof[:-1])
    assert not trust.verify(SECRET, A, B, "server 3", b"")


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match=r"new_secret"):
        trust.prove(b"", A, B, "server 3")


def test_secrets_tokens_and_nonces_are_never_the_same_twice() -> None:
    assert len({trust.new_secret() for _ in range(50)}) == 50
    assert len({trust.new_token() for _ in range(50)}) == 50
    assert len({trust.new_nonce() for _ in range(50)}) == 50


def test_a_token_file_is_for_its_owner_only(tmp_path: Path) -> None:
    token = trust.new_token()
    old = os.umask(0)
    try:
        path = trust.write_token(tmp_path / "token", token)
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o600
    assert trust.read_token(path) == token
    assert os.listdir(tmp_path) == ["token"]


def test_writing_a_token_replaces_the_old_one_and_follows_no_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "token").symlink_to(victim)
    trust.write_token(tmp_path / "token", "trt_new")
    assert victim.read_text() == "precious"
    assert trust.read_token(tmp_path / "token") == "trt_new"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
def test_a_token_that_others_can_reach_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    path = trust.write_token(tmp_path / "token", trust.new_token())
    path.chmod(mode)
    with pytest.raises(trust.TrustError, match=f"chmod 600 {path}"):
        trust.read_token(path)


@pytest.mark.parametrize("content", [b"", b"\n", b"two words", b"x" * 2000, b"\x00\x01\xff"])
def test_a_file_without_a_token_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(trust.TrustError, match="does not hold a token"):
        trust.read_token(path)


def test_no_file_a_folder_and_a_pipe_are_refused(tmp_path: Path) -> None:
    with pytest.raises(trust.TrustError, match="no token at"):
        trust.read_token(tmp_path / "token")
    with pytest.raises(trust.TrustError, match="no ordinary file"):
        trust.read_token(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(trust.TrustError, match="no ordinary file"):  # and it does not wait for a writer
        trust.read_token(tmp_path / "pipe")


def test_a_bearer_header_is_compared_whole() -> None:
    token = trust.new_token()
    assert trust.bearer_matches(token, f"Bearer {token}")
    assert trust.bearer_matches(token, f"bearer {token}")
    for wrong in (None, "", token, f"Basic {token}", "Bearer", "Bearer ", f"Bearer {token[:-1]}", "Bearer \udcff"):
        assert not trust.bearer_matches(token, wrong)
    assert not trust.bearer_matches("", "Bearer ")


def test_what_is_secret_does_not_show() -> None:
    token = trust.new_token()
    for text in (
        f"GET /jobs?token={token}",
        f"Authorization: Bearer {token}",
        f"stored {token} in a file",
        "PASSWORD=hunter2hunter2",
        '{"api_key": "hunter2hunter2"}',
        "AWS_SECRET_ACCESS_KEY=hunter2hunter2",
        "secret=b'hunter2hunter2'",
    ):
        shown = trust.redact(text)
        assert token not in shown
        assert "hunter2" not in shown
        assert "[redacted]" in shown
    assert trust.redact("rank 3 lost at step 12: token bucket empty") == "rank 3 lost at step 12: token bucket empty"
