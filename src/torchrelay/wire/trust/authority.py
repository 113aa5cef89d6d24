"""Authority: the certificate authority of one job. It makes the job's passes at its start; then its key is forgotten.

`cryptography` makes the certificates: the library that Python projects use for it, and the standard library cannot.
Its key never touches a disk, so no further pass can be made for a job, by nobody: all nodes of a job share one.

Workers that talk to one another have certificates that nobody has signed but they themselves: `use_own_certificate`.
"""

from __future__ import annotations

import os
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from torchrelay.wire.trust.passes import Pass, Role, pass_of, write_pass
from torchrelay.wire.trust.trust import fingerprint_of, new_token

DAYS = 366  # a job may take long, and is over by then
SKEW = timedelta(hours=1)  # clocks of machines differ
LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)  # for certificates whose time nobody looks at
LONGEST_NAME = 64  # characters of a name in a certificate (RFC 5280, ub-common-name)


class Authority:
    """Makes passes for one job. `now` is given in tests alone."""

    def __init__(self, job: str, *, days: float = DAYS, now: datetime | None = None) -> None:
        self._since = (now or datetime.now(UTC)) - SKEW
        self._until = self._since + SKEW + timedelta(days=days)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"torchrelay {job}"[:LONGEST_NAME])])
        # Its name alone would be found in another job of the same name: the keys' own digests tell them apart.
        self._own_id = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        usage = _usage(key_cert_sign=True)
        self._certificate = (
            self._begin(self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(self._own_id, critical=False)
            .sign(self._key, hashes.SHA256())
        )

    def issue(self, role: Role, *, days: float | None = None) -> Pass:
        """A pass for this role, with a token of its own; valid as long as the authority, or for so many days."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, role.server_name)])
        uses = [ExtendedKeyUsageOID.SERVER_AUTH] if role is Role.ORCHESTRATOR else []
        certificate = (
            self._begin(name, key.public_key(), days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage([*uses, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(role.server_name)]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(self._own_id), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return Pass(_pem(certificate), _private(key), _pem(self._certificate), new_token())

    def _begin(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, days: float | None = None
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._since)
            .not_valid_after(self._until if days is None else self._since + SKEW + timedelta(days=days))
        )


def make_passes(run_dir: Path, job: str) -> dict[Role, Path]:
    """The passes of a job that begins, one for each role, in its run's folder. Raises OSError."""
    authority = Authority(job)
    return {role: write_pass(pass_of(run_dir, role), authority.issue(role)) for role in Role}


def use_own_certificate(context: ssl.SSLContext) -> str:
    """Make one for this process, let the context show it, forget the key; returns its fingerprint. Raises `OSError`.

    It has neither name nor authority: whoever talks to us learns by a proof whether it is the right one. OpenSSL takes
    it from a file, so there is one in memory, without a name, which is closed at once.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(LONG_AGO)
        .not_valid_after(LONG_AGO + timedelta(days=100 * DAYS))
        .sign(key, hashes.SHA256())
    )
    held = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        with open(held, "w", closefd=False) as file:
            file.write(_private(key) + _pem(certificate))
        context.load_cert_chain(f"/proc/self/fd/{held}")
    finally:
        os.close(held)
    return fingerprint_of(certificate.public_bytes(serialization.Encoding.DER))


def _usage(*, key_cert_sign: bool = False, digital_signature: bool = False) -> x509.KeyUsage:
    """What a key is for (RFC 5280, 4.2.1.3)."""
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _private(key: ec.EllipticCurvePrivateKey) -> str:
    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain).decode()


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()
