"""Error type of Tokenwire, and its conversion to and from gRPC.

An error is a gRPC status with google.rpc details: ErrorInfo always, BadRequest where a field is at
fault, RetryInfo where a retry makes sense.
"""

from collections.abc import Mapping

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

__all__ = ["DETAILS_KEY", "ServiceError", "invalid"]

_DOMAIN = "tokenwire"
DETAILS_KEY = "grpc-status-details-bin"
_MESSAGE_BYTES, _FIELD_BYTES = 1_200, 200
"""Largest message and field path. gRPC allows 8 KiB of metadata: it percent-encodes the message (up
to 3 bytes per byte), and the details hold it twice in base64 (4/3 bytes per byte)."""
_ELLIPSIS = " … ".encode()
_CODES: Mapping[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


class ServiceError(Exception):
    """Failure of a request: status, reason and message for the caller.

    `field` is the path of the request field at fault ("sampling.top_p"); `retry_seconds` is the
    delay after which a retry makes sense. A long message or field, which may quote the request,
    loses its middle.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str,
        message: str,
        *,
        field: str = "",
        retry_seconds: float | None = None,
    ) -> None:
        self.code = code
        self.reason = reason
        self.message = _without_middle(message, _MESSAGE_BYTES)
        self.field = _without_middle(field, _FIELD_BYTES)
        self.retry_seconds = retry_seconds
        super().__init__(self.message)

    def __repr__(self) -> str:
        return f"ServiceError({self.code.name}, {self.reason}, {self.message!r}, {self.field!r})"

    def to_status(self) -> status_pb2.Status:
        """Return the error as a google.rpc.Status."""
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        info = error_details_pb2.ErrorInfo(reason=self.reason, domain=_DOMAIN)
        status.details.add().Pack(info)
        if self.field:
            violation = error_details_pb2.BadRequest.FieldViolation(
                field=self.field, description=self.message
            )
            status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
        if self.retry_seconds is not None:
            delay = Duration()
            delay.FromNanoseconds(int(self.retry_seconds * 1e9))
            status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        return status

    @classmethod
    def from_status(cls, status: status_pb2.Status) -> "ServiceError":
        """Read a google.rpc.Status; skip unknown details."""
        reason, field, retry = "UNKNOWN", "", None
        for detail in status.details:
            info = error_details_pb2.ErrorInfo()
            bad_request = error_details_pb2.BadRequest()
            retry_info = error_details_pb2.RetryInfo()
            if detail.Unpack(info):
                reason = info.reason
            elif detail.Unpack(bad_request) and bad_request.field_violations:
                field = bad_request.field_violations[0].field
            elif detail.Unpack(retry_info):
                retry = retry_info.retry_delay.ToNanoseconds() / 1e9
        code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
        return cls(code, reason, status.message, field=field, retry_seconds=retry)

    @classmethod
    def from_rpc_error(cls, error: grpc.aio.AioRpcError) -> "ServiceError":
        """Read the error of a failed call, with its details if the server sent them."""
        for key, value in error.trailing_metadata() or ():
            if key == DETAILS_KEY and isinstance(value, bytes):
                return cls.from_status(status_pb2.Status.FromString(value))
        reason = "UNREACHABLE" if error.code() is grpc.StatusCode.UNAVAILABLE else "UNKNOWN"
        return cls(error.code(), reason, error.details() or error.code().name)


def invalid(field: str, message: str, *, reason: str = "INVALID_FIELD") -> ServiceError:
    """Return INVALID_ARGUMENT with the path of the field at fault."""
    return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, reason, message, field=field)


def _without_middle(text: str, most: int) -> str:
    """Return the text without its middle, in at most `most` bytes of UTF-8."""
    data = text.encode("utf-8", "replace")
    if len(data) > most:
        half = (most - len(_ELLIPSIS)) // 2
        data = data[:half] + _ELLIPSIS + data[-half:]
    return data.decode("utf-8", "ignore")
