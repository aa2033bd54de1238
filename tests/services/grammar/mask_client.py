"""Client of masks in tests: it draws among the allowed ids, in place of the engine."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
from tokenizers import Tokenizer

from services.engine.frontend.mask_stream import MaskState, MaskStream
from tokenwire.errors import ServiceError

PADDING = 5  # logits wider than the tokenizer, as many checkpoints have
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["red", "green", "blue"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    },
    "required": ["name", "age", "kind", "tags", "code"],
    "additionalProperties": False,
}


@dataclass
class Decoder:
    """Client in place of the engine: it draws among the allowed ids and feeds them back."""

    stream: MaskStream
    states: asyncio.Queue[list[MaskState]]
    lost: asyncio.Queue[ServiceError]
    width: int

    @classmethod
    def over(cls, channel: grpc.aio.Channel, tokenizer: Tokenizer, slots: int = 1024) -> "Decoder":
        states, lost = asyncio.Queue[list[MaskState]](), asyncio.Queue[ServiceError]()
        width = tokenizer.get_vocab_size() + PADDING
        stream = MaskStream(
            channel,
            vocabulary_size=width,
            eos_token_ids=[0],
            on_states=states.put_nowait,
            on_lost=lost.put_nowait,
            answer_seconds=60,
            mask_slots=slots,
        )
        return cls(stream, states, lost, width)

    def allowed(self, state: MaskState) -> list[int]:
        assert state.error is None, state.error
        if state.mask is None:
            return list(range(self.width))
        assert len(state.mask) == (self.width + 7) // 8
        ids = [i for i in range(len(state.mask) * 8) if state.mask[i >> 3] >> (i & 7) & 1]
        assert not ids or ids[-1] < self.width - PADDING
        assert 1 not in ids  # the checkpoint's other EOS id, which this client does not use
        return ids

    async def generate(
        self, grammar_id: str, seeds: Sequence[int], most: int = 400
    ) -> dict[int, list[int]]:
        """Return the ids of one sequence per seed: up to its grammar's end, or `most` ids."""
        sources = {seed: random.Random(seed) for seed in seeds}
        output: dict[int, list[int]] = {seed: [] for seed in seeds}
        for seed in seeds:
            self.stream.open(seed, grammar_id, [])
        running = set(seeds)
        while running:
            for state in await self.states.get():
                ids, output_ids = self.allowed(state), output[state.matcher]
                output_ids += state.forced
                if not state.terminated and len(output_ids) < most:
                    assert ids
                    token = sources[state.matcher].choice(ids)
                    if token != 0:
                        output_ids.append(token)
                        self.stream.accept(state.matcher, [token])
                        continue
                running.discard(state.matcher)
                self.stream.close(state.matcher)
        return output
