"""Log probabilities of an answer's content, as in OpenAI's chats and responses."""

import math
from collections.abc import Iterable

from msgspec import Struct

from tokenwire.pb.completion.v1 import completion_pb2

__all__ = ["ContentLogprob", "TokenLogprob", "finite", "logprobs_of"]

_IMPOSSIBLE = -9999.0  # OpenAI's value for -inf, which JSON does not have


class TokenLogprob(Struct):
    """A token and its bytes; `token` escapes bytes that are not a whole character."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TokenLogprob):
    """A token of the content, and the likeliest candidates in its place."""

    top_logprobs: list[TokenLogprob]


def logprobs_of(
    deltas: Iterable[completion_pb2.ChoiceDelta], *, as_ids: bool = False
) -> list[ContentLogprob]:
    """Return an entry for each token of the content. as_ids: show ids in place of texts."""
    content: list[ContentLogprob] = []
    for delta in deltas:
        columns, width = delta.tokens, delta.tokens.top_width
        tops = [
            _token(token, logprob, data, as_ids)
            for token, logprob, data in zip(
                columns.top_ids, columns.top_logprobs, delta.top_bytes, strict=True
            )
        ]
        for i, (token, logprob, data) in enumerate(
            zip(columns.ids, columns.logprobs, delta.token_bytes, strict=True)
        ):
            entry = _token(token, logprob, data, as_ids)
            top = tops[i * width : (i + 1) * width]
            content.append(ContentLogprob(entry.token, entry.logprob, entry.bytes, top))
    return content


def _token(token: int, logprob: float, data: bytes, as_ids: bool) -> TokenLogprob:
    text = f"token_id:{token}" if as_ids else data.decode("utf-8", "backslashreplace")
    return TokenLogprob(text, finite(logprob), list(data))


def finite(logprob: float) -> float:
    """Return a number that JSON can express."""
    return _IMPOSSIBLE if logprob == -math.inf else logprob
