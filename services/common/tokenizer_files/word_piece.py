"""WordPiece tokenizers of BERT, in the form of tokenizer.json."""

from collections.abc import Sequence

from services.common.json_values import Json
from services.common.tokenizer_files.definition import (
    AddedToken,
    TokenizerError,
    tokenizer_definition,
)
from services.common.tokenizer_files.frame import frame

__all__ = ["CONTINUATION", "word_piece"]

CONTINUATION = "##"
"""Prefix of the tokens that continue a word"""
_LONGEST_WORD = 100
"""Characters of the longest word that is cut; longer words are unknown tokens"""


def word_piece(
    tokens: Sequence[str],
    added: Sequence[AddedToken],
    *,
    unknown: int,
    first: int,
    last: int,
    lowers: bool,
    strips_accents: bool,
) -> dict[str, Json]:
    """Return WordPiece, which cuts a word into the longest tokens from its start.

    tokens: texts by id. unknown, first, last: ids of the unknown token, and of the tokens before
    and after a text. lowers: whether texts become lower case. Raises TokenizerError for an id
    without a token, and for a token that occurs twice.
    """
    roles = {"unknown": unknown, "first": first, "last": last}
    for role, token in roles.items():
        if not 0 <= token < len(tokens):
            raise TokenizerError(f"its {role} token is {token}, and it has {len(tokens)} tokens")
    vocabulary: dict[str, Json] = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        raise TokenizerError("it has a token twice")
    made = tokenizer_definition(
        added,
        normalizer={
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": strips_accents,
            "lowercase": lowers,
        },
        pre_tokenizer={"type": "BertPreTokenizer"},
        decoder={"type": "WordPiece", "prefix": CONTINUATION, "cleanup": True},
        model={
            "type": "WordPiece",
            "unk_token": tokens[unknown],
            "continuing_subword_prefix": CONTINUATION,
            "max_input_chars_per_word": _LONGEST_WORD,
            "vocab": vocabulary,
        },
    )
    return {**made, "post_processor": frame(tokens, [first], [last], has_types=True)}
