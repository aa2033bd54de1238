"""TLS context of the HTTPS port, which answers plain HTTP with a sentence.

asyncio and uvloop hand the bytes of a connection to `do_handshake`. If they are the head of an HTTP
request, the answer goes out in place of a handshake. What the client sends further is discarded
until it closes, or until the event loop's timeout of handshakes, as for any silent client.
"""

import logging
import re
import ssl

from services.http_shim.errors import refusal
from services.http_shim.metrics import NO_ROUTE, REQUESTS

__all__ = ["HttpsContext"]

_LOG = logging.getLogger("connection")
_REQUEST_LINE = re.compile(rb"[A-Z]{3,10} [\x21-\x7e]+")
_BODY = refusal(400, "This port speaks HTTPS: use https:// in place of http://.", "https_required")
_ANSWER = b"".join(
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"content-type: application/json\r\n",
        b"content-length: %d\r\n" % len(_BODY),
        b"connection: close\r\n\r\n",
        _BODY,
    ]
)


class HttpsContext(ssl.SSLContext):
    """Context whose connections may begin with plain HTTP."""

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """Return the TLS side of a connection."""
        made = super().wrap_bio(incoming, outgoing, server_side, server_hostname, session)
        assert isinstance(made, _HttpsObject)
        made.incoming, made.outgoing = incoming, outgoing
        return made


class _HttpsObject(ssl.SSLObject):
    """TLS side of one connection."""

    incoming: ssl.MemoryBIO
    outgoing: ssl.MemoryBIO
    _is_known = False
    """True once the first bytes are read"""
    _is_plain = False

    def do_handshake(self) -> None:
        """Continue the handshake, or answer plain HTTP. Raises SSLError."""
        if not self._is_known and self.incoming.pending:
            self._is_known = True
            self._look_at(self.incoming.read())
        if self._is_plain:
            self.incoming.read()
            raise ssl.SSLWantReadError
        super().do_handshake()

    def _look_at(self, begin: bytes) -> None:
        """Answer the first bytes of a request; put those of a handshake back."""
        if _REQUEST_LINE.match(begin) is None:
            self.incoming.write(begin)
            return
        self._is_plain = True
        self.outgoing.write(_ANSWER)
        REQUESTS.labels(NO_ROUTE, 400, "").inc()
        _LOG.info("refused plain HTTP at the HTTPS port")


HttpsContext.sslobject_class = _HttpsObject
