"""Random outputs of a schema, drawn from its masks, and membership tests."""

import json
import random
from functools import cache
from typing import Any

from llguidance import LLTokenizer

from services.grammar.matching.prototype import compile_prototype
from services.grammar.matching.vocabulary import load
from services.grammar.specification import check, translate
from tokenwire.pb.types.v1.types_pb2 import GrammarSpec
from tokenwire.serving.stack_layout import embedded_checkpoint

__all__ = ["BYTES", "TOKENIZERS", "Drawing"]

BYTES = LLTokenizer("byte")
TOKENIZERS = {"bytes": BYTES, "model": load(embedded_checkpoint()).tokenizer}
_ASCII = (1 << 128) - 1
_PATIENCE = 40  # tokens; after them, the walk prefers tokens that end a value
_MOST = 2_000  # tokens


class Drawing:
    """A compiled schema."""

    def __init__(self, schema: Any, tokenizer: LLTokenizer = BYTES) -> None:
        """Raises GrammarError as the service does."""
        spec = GrammarSpec(json_schema=json.dumps(schema))
        check(spec)
        self._tokenizer = tokenizer
        self._ends = sum(1 << token for token in _ends(tokenizer))
        self._unused = sum(1 << token for token in tokenizer.eos_tokens)
        self._prototype = compile_prototype(tokenizer, translate(spec))

    def draw(self, count: int, seed: int = 0) -> list[Any]:
        """Return `count` random values."""
        source = random.Random(seed)
        return [json.loads(self._walk(source)) for _ in range(count)]

    def allows(self, text: str) -> bool:
        """Return whether the schema allows a JSON text. The tokens must be bytes."""
        matcher, content = self._prototype.deep_copy(), list(text.encode())
        return matcher.try_consume_tokens(content) == len(content) and matcher.is_accepting()

    def _walk(self, source: random.Random) -> bytes:
        matcher, ids = self._prototype.deep_copy(), list[int]()
        while len(ids) < _MOST:
            allowed = int.from_bytes(matcher.compute_bitmask(), "little") & ~self._unused
            if matcher.is_accepting() and (not allowed or source.random() < 0.5):
                return self._tokenizer.decode_bytes(ids)
            if len(ids) > _PATIENCE:
                allowed = allowed & self._ends or allowed
            elif self._tokenizer is BYTES and source.random() < 0.8:
                allowed = allowed & _ASCII or allowed
            ids.append(_any(allowed, source))
            assert matcher.consume_token(ids[-1])
        raise AssertionError("the walk found no end")


@cache
def _ends(tokenizer: LLTokenizer) -> list[int]:
    """Return the tokens that may end a string, an object or an array."""
    return [
        token
        for token in range(tokenizer.vocab_size)
        if tokenizer.decode_bytes([token])[:1] in (b'"', b"}", b"]")
    ]


def _any(allowed: int, source: random.Random) -> int:
    """Return the position of a random set bit."""
    start = source.randrange(allowed.bit_length())
    return start + ((allowed >> start) & -(allowed >> start)).bit_length() - 1
