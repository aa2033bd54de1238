"""TLS: certificates of servers and clients, from PEM files that may be replaced.

gRPC is imported where it is used: processes that fork read settings without it.
"""

import asyncio
import logging
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import grpc

__all__ = ["ClientTls", "ServerTls", "TlsError", "stamp"]

_LOG = logging.getLogger("tls")
_LOOK_SECONDS = 1.0


class TlsError(Exception):
    """The certificates can't be used. The message is one sentence."""


@dataclass(frozen=True, slots=True)
class ClientTls:
    """Authorities that sign the servers' certificates, and the certificate of the client."""

    ca: Path
    certificate: Path | None = None
    key: Path | None = None

    @property
    def files(self) -> Sequence[Path]:
        return [each for each in (self.ca, self.certificate, self.key) if each is not None]

    def credentials(self) -> "grpc.ChannelCredentials":
        """Read the files. Raises TlsError."""
        import grpc

        _require_authorities(self.ca)
        if self.certificate is None or self.key is None:
            return grpc.ssl_channel_credentials(_read(self.ca))
        _require_pair(self.certificate, self.key)
        return grpc.ssl_channel_credentials(
            _read(self.ca), private_key=_read(self.key), certificate_chain=_read(self.certificate)
        )

    def context(self) -> ssl.SSLContext:
        """Return the context of an HTTP client. Raises TlsError."""
        _require_authorities(self.ca)
        context = ssl.create_default_context(cafile=self.ca)
        if self.certificate is not None and self.key is not None:
            _require_pair(self.certificate, self.key)
            context.load_cert_chain(self.certificate, self.key)
        return context


@dataclass(frozen=True, slots=True)
class ServerTls:
    """Certificate of a server, and the authorities that sign its clients' certificates."""

    certificate: Path
    key: Path
    client_ca: Path | None = None
    """File of the authorities of clients; None = clients need no certificate"""

    @property
    def files(self) -> Sequence[Path]:
        return [each for each in (self.certificate, self.key, self.client_ca) if each is not None]

    def require(self) -> None:
        """Raise TlsError if the files can't be used."""
        _require_pair(self.certificate, self.key)
        if self.client_ca is not None:
            _require_authorities(self.client_ca)

    def credentials(self) -> "grpc.ServerCredentials":
        """Return credentials that follow the files. Unusable files change nothing. Raises TlsError.

        Existing connections keep the certificate with which they were opened.
        """
        import grpc

        self.require()
        seen = stamp(self.files)

        def newer() -> "grpc.ServerCertificateConfiguration | None":
            nonlocal seen
            if (now := stamp(self.files)) == seen:
                return None
            seen = now
            try:
                self.require()
                configuration = self._configuration()
            except TlsError as error:
                _LOG.error("%s The previous certificate stays.", error)
                return None
            _LOG.info("the certificate %s is in use", self.certificate)
            return configuration

        return grpc.dynamic_ssl_server_credentials(
            self._configuration(),
            newer,  # type: ignore[arg-type]  # None = no change
            require_client_authentication=self.client_ca is not None,
        )

    def context(self, kind: type[ssl.SSLContext] = ssl.SSLContext) -> ssl.SSLContext:
        """Return the context of an HTTP server, of some class. Raises TlsError."""
        self.require()
        default = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context = kind(ssl.PROTOCOL_TLS_SERVER)
        context.options, context.verify_flags = default.options, default.verify_flags
        context.load_cert_chain(self.certificate, self.key)
        context.set_alpn_protocols(["http/1.1"])
        if self.client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.client_ca)
        return context

    async def follow(self, context: ssl.SSLContext) -> None:
        """Put a replaced certificate into the context of an HTTP server, until cancelled."""
        seen, problem = stamp(self.files), ""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if (now := stamp(self.files)) == seen:
                continue
            try:
                self.require()
                context.load_cert_chain(self.certificate, self.key)
            except (TlsError, OSError) as error:  # file descriptors may be free later
                if problem != str(error):
                    _LOG.error("%s The previous certificate stays.", error)
                problem = str(error)
            else:
                seen, problem = now, ""
                _LOG.info("the certificate %s is in use", self.certificate)

    def _configuration(self) -> "grpc.ServerCertificateConfiguration":
        import grpc

        pairs = [(_read(self.key), _read(self.certificate))]
        authorities = None if self.client_ca is None else _read(self.client_ca)
        return grpc.ssl_server_certificate_configuration(pairs, authorities)


def stamp(files: Sequence[Path]) -> tuple[tuple[int, int] | None, ...]:
    """Return a value that changes when one of the files is replaced."""

    def one(file: Path) -> tuple[int, int] | None:
        try:
            status = file.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino

    return tuple(map(one, files))


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise TlsError(f"{file} can't be read: {error.strerror}.") from None


def _require_pair(certificate: Path, key: Path) -> None:
    for file in (certificate, key):
        _read(file)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        mismatch = "KEY_VALUES_MISMATCH" in str(error)
        why = "don't belong together" if mismatch else "are no certificate and key in PEM"
        raise TlsError(f"{certificate} and {key} {why}.") from None


def _require_authorities(ca: Path) -> None:
    _read(ca)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(ca)
    except ssl.SSLError:
        raise TlsError(f"{ca} has no certificates in PEM.") from None
