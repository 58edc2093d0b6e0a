"""Keys and certificates: two authorities, and one certificate per party and channel. All keys are P-384, as Flower
wants them; private keys are files that only their owner can read."""

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from holdfast.errors import HoldfastError
from holdfast.files import write_atomic

AUTHORITY_DAYS = 3650
EARLY = timedelta(minutes=5)  # clocks differ

Key = ec.EllipticCurvePrivateKey


@dataclass(frozen=True)
class Authority:
    """A CA: it signs the certificates of one operator's channel."""

    certificate: x509.Certificate
    key: Key

    @staticmethod
    def create(name: str, days: int = AUTHORITY_DAYS) -> "Authority":
        key = new_key()
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        usage = x509.KeyUsage(
            digital_signature=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        builder = (
            _builder(subject, subject, key.public_key(), days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        return Authority(builder.sign(key, hashes.SHA384()), key)

    @staticmethod
    def load(folder: Path) -> "Authority":
        """The CA whose `ca.crt` and `ca.key` are in a folder."""
        certificate, key = load_certificate(folder / "ca.crt"), load_key(folder / "ca.key")
        if certificate.public_key() != key.public_key():
            raise HoldfastError(f"{folder / 'ca.key'} is not the key of {folder / 'ca.crt'}; take the pair of one CA")
        return Authority(certificate, key)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(folder / "ca.crt", pem(self.certificate))
        write_secret(folder / "ca.key", key_pem(self.key))

    def issue(
        self, name: str, key: Key, hosts: Sequence[str] = (), number: int | None = None, days: int = 825
    ) -> bytes:
        """A certificate of a party by its role: `server`, `proxy`, or `site:<name>` with the site's number."""
        attributes = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
        if number is not None:
            attributes.append(x509.NameAttribute(NameOID.SERIAL_NUMBER, str(number)))
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if hosts else [])]
        builder = (
            _builder(x509.Name(attributes), self.certificate.subject, key.public_key(), days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
        )
        if hosts:
            names: list[x509.GeneralName] = [_host(host) for host in dict.fromkeys(hosts)]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return pem(builder.sign(self.key, hashes.SHA384()))


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLY + min(timedelta(0), timedelta(days=days)))
        .not_valid_after(now + timedelta(days=days) if days > 0 else now - timedelta(seconds=1))
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def new_key() -> Key:
    return ec.generate_private_key(ec.SECP384R1())


def pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def key_pem(key: Key) -> bytes:
    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)


def public_pem(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def write_secret(path: Path, content: bytes) -> None:
    """Writes a file that nobody but its owner can read, from its first moment on."""
    old = os.umask(0o077)
    try:
        write_atomic(path, content)
    finally:
        os.umask(old)


def load_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise HoldfastError(f"cannot read the certificate {path}: {error.strerror}; take the whole kit") from error
    except ValueError as error:
        raise HoldfastError(f"{path} is not a certificate; take the kit again as it was written") from error


def load_key(path: Path) -> Key:
    """A private key; refused if others can read it."""
    try:
        mode = path.stat().st_mode
        content = path.read_bytes()
    except OSError as error:
        raise HoldfastError(f"cannot read the key {path}: {error.strerror}; take the whole kit") from error
    if mode & 0o077:
        raise HoldfastError(f"others can read the key {path}; run: chmod 600 {path}")
    try:
        key = serialization.load_pem_private_key(content, None)
    except (ValueError, TypeError) as error:
        raise HoldfastError(f"{path} is not a private key; take the kit again as it was written") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name != "secp384r1":
        raise HoldfastError(f"{path} is not a P-384 key; take the kit again as it was written")
    return key


def check_certificate(certificate: x509.Certificate, authority: x509.Certificate, what: str) -> None:
    """Raises HoldfastError unless this authority has signed the certificate and it is valid now."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise HoldfastError(
            f"{what} is not signed by this federation's CA; ask for a kit of this federation"
        ) from error
    now = datetime.now(UTC)
    if now > certificate.not_valid_after_utc:
        raise HoldfastError(
            f"{what} expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC; ask for a new kit"
        )
    if now < certificate.not_valid_before_utc:
        raise HoldfastError(
            f"{what} is valid only from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC; set this machine's clock"
        )


def role_of(certificate: x509.Certificate) -> str:
    """`server`, `proxy` or `site:<name>`."""
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else ""


def number_of(certificate: x509.Certificate) -> int | None:
    """The number of a site in its federation."""
    found = certificate.subject.get_attributes_for_oid(NameOID.SERIAL_NUMBER)
    return int(found[0].value) if found and str(found[0].value).isdigit() else None


def fingerprint(certificate: x509.Certificate) -> str:
    """SHA-256, as `openssl x509 -fingerprint` prints it."""
    digest = certificate.fingerprint(hashes.SHA256()).hex().upper()
    return ":".join(digest[i : i + 2] for i in range(0, len(digest), 2))
