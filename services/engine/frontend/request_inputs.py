"""Grammar and images of a request, prepared before the loop gets it."""

import asyncio
from dataclasses import dataclass, replace

from services.engine.checked_request import CheckedRequest
from services.engine.frontend.image_client import ImageClient
from services.engine.frontend.image_placement import place_images
from services.engine.frontend.matchers import CompiledGrammar, Matchers
from tokenwire.pb.engine.v1.engine_pb2 import GenerateRequest

__all__ = ["RequestInputs"]


@dataclass(frozen=True, slots=True)
class RequestInputs:
    """The grammar and the images of one request."""

    request: GenerateRequest
    checked: CheckedRequest
    tenant: str

    async def prepare(
        self, matchers: Matchers | None, images: ImageClient | None, *, consecutive_images: bool
    ) -> tuple[CompiledGrammar | None, CheckedRequest]:
        """Return the grammar, None without one, and the request with its images placed.

        consecutive_images: whether the tokens of an image must have no other tokens between them.
        Raises ServiceError.
        """
        compiling = asyncio.ensure_future(self._compile(matchers))
        encoding = asyncio.ensure_future(self._with_images(images, consecutive_images))
        try:
            return await asyncio.gather(compiling, encoding)
        finally:
            compiling.cancel()
            encoding.cancel()

    async def _compile(self, matchers: Matchers | None) -> CompiledGrammar | None:
        if matchers is None or not self.checked.constrained:
            return None
        return await matchers.compile(self.request.grammar, self.tenant)

    async def _with_images(self, client: ImageClient | None, consecutive: bool) -> CheckedRequest:
        request, checked = self.request, self.checked
        if client is None or not request.images:
            return checked
        images = await client.encode([image.data for image in request.images], self.tenant)
        placed = place_images(
            checked.prompts,
            request.images,
            images,
            client.image_token_id,
            consecutive=consecutive,
        )
        return replace(checked, images=placed)
