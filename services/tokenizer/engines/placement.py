"""One request on one engine: its needs, and its share of the engine's load."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from services.common.block_hash import ImagePlaces, prefix_hashes, prompt_salt, tenant_salt
from tokenwire.pb.engine.v1 import engine_pb2

if TYPE_CHECKING:
    from services.tokenizer.engines.engine_link import EngineLink

__all__ = ["Need", "Placement"]


_REPORT_SECONDS = 1.0
"""Seconds after the end of a request in which the engine reports its last blocks"""


class Need:
    """Prompt tokens and sequences of a request, and the hashes of its prompts' blocks."""

    def __init__(
        self,
        request: engine_pb2.GenerateRequest,
        tenant: str,
        images: Sequence[Sequence[ImagePlaces]] = (),
        adapter: str = "",
    ) -> None:
        """images: images of each prompt, if there are any. adapter: fingerprint; empty = none."""
        self.model = request.model
        self._adapter = adapter
        self.tokens = sum(len(prompt.ids) for prompt in request.prompts)
        self.sequences = len(request.prompts) * (request.n if request.HasField("n") else 1)
        self.tenant = tenant
        self._request = request
        self._images = images or [()] * len(request.prompts)
        self._salt = prompt_salt(tenant_salt(tenant), adapter)
        self._hashes: dict[int, Sequence[Sequence[bytes]]] = {}

    def suits(self, link: "EngineLink") -> bool:
        """Return whether an engine has the request's adapter."""
        return not self._adapter or link.adapters.get(self.model) == self._adapter

    @property
    def text_prompts(self) -> Sequence[Sequence[int]]:
        """Ids of the prompts; empty if ids do not name the blocks: with images or an adapter."""
        request = self._request
        return () if request.images or self._adapter else [prompt.ids for prompt in request.prompts]

    def hashes(self, block_size: int) -> Sequence[Sequence[bytes]]:
        """Return, for each prompt, the hashes of the blocks that a prefix cache may serve.

        At least the last token is always computed. Prompts with scores are computed whole.
        """
        request = self._request
        if request.HasField("prompt_logprobs"):
            return ()
        if block_size not in self._hashes:
            self._hashes[block_size] = [
                prefix_hashes(prompt.ids[:-1], self._salt, block_size, images)
                for prompt, images in zip(request.prompts, self._images, strict=True)
            ]
        return self._hashes[block_size]


class Placement:
    """A request's share of an engine's load, from its start to its end."""

    def __init__(self, link: "EngineLink", need: Need) -> None:
        self.link = link
        self.sequences = need.sequences
        prompts = link.hashes_of(need)
        cached, size = link.cached, link.block_size
        self.waiting_tokens = need.tokens - size * sum(map(cached.prefix, prompts))
        """Prompt tokens to compute before the first delta; 0 after it"""
        self._promised = size * sum(map(cached.reported_prefix, prompts))
        self._hashes = [each for prompt in prompts for each in prompt]
        cached.expect(self._hashes)
        link.enter(self)

    def on_admitted(self, cached_tokens: Sequence[int]) -> None:
        """Correct the load by the engine's own count of cached tokens."""
        self.link.on_admitted(self._promised, sum(cached_tokens))

    def on_output(self) -> None:
        """Record the first output, before which the prompt was computed."""
        if self.waiting_tokens:
            self.link.on_computed(self.waiting_tokens)
            self.waiting_tokens = 0

    def leave(self) -> None:
        """Remove the request from the engine's load."""
        self.on_output()
        if self._hashes:
            later = asyncio.get_running_loop().call_later
            later(_REPORT_SECONDS, self.link.cached.expect_no_more, self._hashes)
        self.link.leave(self)
