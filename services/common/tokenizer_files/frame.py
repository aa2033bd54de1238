"""Special tokens around texts and pairs of texts, in the form of tokenizer.json."""

from collections.abc import Sequence

from services.common.json_values import Json

__all__ = ["frame"]


def frame(
    tokens: Sequence[str],
    first: Sequence[int],
    last: Sequence[int],
    *,
    between: Sequence[int] = (),
    has_types: bool = False,
) -> Json:
    """Return the post-processor that puts special tokens around a text or a pair of texts.

    tokens: texts by id. first: ids before a text or a pair; last: ids behind each text; between:
    further ids before the second text of a pair. has_types: the second text has a type of its own.
    """
    side = int(has_types)
    special: dict[str, Json] = {
        tokens[token]: {"id": tokens[token], "ids": [token], "tokens": [tokens[token]]}
        for token in (*first, *last, *between)
    }
    before, behind = ([_token(tokens[token], 0) for token in part] for part in (first, last))
    single = [*before, _text("A", 0), *behind]
    return {
        "type": "TemplateProcessing",
        "single": [*single],
        "pair": [
            *single,
            *(_token(tokens[token], 0) for token in between),
            _text("B", side),
            *(_token(tokens[token], side) for token in last),
        ],
        "special_tokens": special,
    }


def _token(text: str, side: int) -> Json:
    return {"SpecialToken": {"id": text, "type_id": side}}


def _text(name: str, side: int) -> Json:
    return {"Sequence": {"id": name, "type_id": side}}
