"""Trust: secrets, tokens, and the proof that one knows a secret without sending it.

A *secret* belongs to a job and never leaves memory; two workers prove to each other that they know it. A *token* is
what an operator or an agent shows to the orchestrator; it lies in a file that only its owner can read.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets

from torchrelay.wire.trust.tokens import TrustError as TrustError
from torchrelay.wire.trust.tokens import read_token as read_token
from torchrelay.wire.trust.tokens import write_token as write_token

SECRET_BYTES = 32
NONCE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size
_TOKEN_PREFIX = "trt_"  # recognisable, so that `redact` finds a token wherever it stands

_SENSITIVE = (
    re.compile(rf"(?P<keep>){_TOKEN_PREFIX}[A-Za-z0-9_-]{{16,}}"),
    re.compile(r"(?i)(?P<keep>\bbearer\s+)[^\s'\",;]+"),
    re.compile(
        r"(?i)(?P<keep>[\w-]*(?:token|secret|passw(?:or)?d|api[_-]?key)[\w-]*['\"]?\s*[=:]\s*b?['\"]?)[^\s'\",;&]+"
    ),
)


def new_secret() -> bytes:
    """A job's secret: 32 random bytes."""
    return secrets.token_bytes(SECRET_BYTES)


def new_nonce() -> bytes:
    """32 random bytes that are never used again."""
    return secrets.token_bytes(NONCE_BYTES)


def new_token() -> str:
    """A token for the orchestrator's API: 32 random bytes, in letters that fit a header."""
    return _TOKEN_PREFIX + secrets.token_urlsafe(32)


def fingerprint_of(certificate: bytes) -> str:
    """By which a certificate is known: SHA-256 of its DER."""
    return hashlib.sha256(certificate).hexdigest()


def prove(secret: bytes, nonce_a: bytes, nonce_b: bytes, context: str) -> bytes:
    """HMAC-SHA256 over both sides' nonces and what the proof is for. 32 bytes.

    `context` must name the role of who proves (and the generation): a proof is then of no use to who receives it.
    """
    if len(secret) < SECRET_BYTES:
        raise ValueError(f"a secret of {len(secret)} bytes proves nothing: make one with new_secret()")
    parts = (nonce_a, nonce_b, context.encode())
    # Each part with its length, so that no two different lists of parts give the same bytes.
    message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(secret, message, "sha256")


def verify(secret: bytes, nonce_a: bytes, nonce_b: bytes, context: str, proof: bytes) -> bool:
    """Whether `proof` was made with this secret for the same nonces and context. Takes the same time either way."""
    return hmac.compare_digest(prove(secret, nonce_a, nonce_b, context), proof)


def keys_of(secret: bytes, generation: int) -> str:
    """Where the workers of a job meet in a store in this generation: a prefix that only they can know beforehand."""
    return f"torchrelay/{hmac.digest(secret, f'store keys {generation}'.encode(), 'sha256').hex()}"


def token_matches(expected: str, presented: str | None) -> bool:
    """Whether the token presented is the expected one, in constant time. An empty expected token matches nothing."""
    if not expected or presented is None:
        return False
    return hmac.compare_digest(expected.encode(), presented.encode("utf-8", "surrogateescape"))


def bearer_matches(expected: str, header: str | None) -> bool:
    """Whether an `Authorization` header (`Bearer <token>`) carries the expected token."""
    scheme, _, token = (header or "").partition(" ")
    return scheme.lower() == "bearer" and token_matches(expected, token.strip())


def redact(text: str) -> str:
    """The text with tokens, bearer headers and values of fields that sound secret replaced by `[redacted]`."""
    for pattern in _SENSITIVE:
        text = pattern.sub(lambda found: f"{found['keep']}[redacted]", text)
    return text
