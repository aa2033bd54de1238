"""Text of PDFs, read by the jobs service."""

from dataclasses import dataclass

import grpc

from tokenwire.channel import connect
from tokenwire.cli.chat.attachments import AttachmentError
from tokenwire.errors import ServiceError
from tokenwire.loopback import is_local_target
from tokenwire.pb.jobs.v1 import jobs_pb2
from tokenwire.pb.jobs.v1.jobs_pb2_grpc import FileServiceStub
from tokenwire.tls import ClientTls

__all__ = ["PdfReader"]

_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class PdfReader:
    """Client of the jobs service at "host:port" for the texts of PDFs."""

    target: str
    """Empty = there is no jobs service"""
    tls: ClientTls | None
    key: str
    plaintext: bool = False
    """Send the key beyond this machine in clear text"""

    async def read(self, data: bytes, name: str) -> str:
        """Return the text of a PDF. Raises AttachmentError."""
        if not self.target:
            raise AttachmentError(
                f"{name} is a PDF; the jobs service reads those, and this server has none."
            )
        if self.key and not (self.tls or self.plaintext or is_local_target(self.target)):
            raise AttachmentError(
                f"The API key would go to {self.target} in clear text: use --tls-ca or --plaintext."
            )
        document = jobs_pb2.Document(data=data, media_type="application/pdf", field=name)
        request = jobs_pb2.ReadTextRequest(documents=[document])
        token = (lambda: self.key) if self.key else None
        try:
            async with connect(self.target, tls=self.tls, token=token) as channel:
                answer = await FileServiceStub(channel).ReadText(request, timeout=_SECONDS)
        except grpc.aio.AioRpcError as failure:
            error = ServiceError.from_rpc_error(failure)
            if error.reason == "UNREACHABLE":
                raise AttachmentError(
                    f"{name} is a PDF; the jobs service reads those, and none answers at "
                    f"{self.target}. --jobs names another."
                ) from None
            raise AttachmentError(error.message) from None
        return answer.texts[0]
