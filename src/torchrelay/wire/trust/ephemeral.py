"""Ephemeral: the certificate of one process, which nobody has signed but the process itself, and its key.

It has no name and no authority: whoever talks to the process learns by a proof whether this is the right certificate
(see `torchrelay.worker.transfer.tls`). Both live as long as the process. The key is never on a disk: OpenSSL
takes it from a file, so that is one in memory without a name, closed at once.
"""

from __future__ import annotations

import hashlib
import os
import ssl
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

SINCE = datetime(2000, 1, 1, tzinfo=UTC)  # nobody looks at the times, and clocks of machines differ
DAYS = 36_500


def use_new_certificate(context: ssl.SSLContext) -> str:
    """Make one, let the context show it, and forget the key; returns its fingerprint. Raises `OSError`."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(SINCE)
        .not_valid_after(SINCE + timedelta(days=DAYS))
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    held = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        with open(held, "wb", closefd=False) as file:
            file.write(private + certificate.public_bytes(serialization.Encoding.PEM))
        context.load_cert_chain(f"/proc/self/fd/{held}")
    finally:
        os.close(held)
    return fingerprint_of(certificate.public_bytes(serialization.Encoding.DER))


def fingerprint_of(certificate: bytes) -> str:
    """By which a certificate is known: SHA-256 of its DER."""
    return hashlib.sha256(certificate).hexdigest()
