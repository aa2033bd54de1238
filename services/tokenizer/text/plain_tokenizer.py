"""Tokenizer of text that a client wrote: it never produces a control token."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

__all__ = ["plain_tokenizer"]

_NEVER = -1e9
"""Unigram score of a token that no segmentation contains"""


def plain_tokenizer(
    tokenizer: Tokenizer, definition: Mapping[str, Any], control: frozenset[str]
) -> Tokenizer:
    """Return a tokenizer with the same ids that never produces a control token from text.

    tokenizer: the one that `definition`, a tokenizer.json, describes. control: texts of the
    control tokens. The two tokenizers share their model where its vocabulary allows it, which
    takes no time and no memory.
    """
    kept = [
        token
        for _, token in sorted(tokenizer.get_added_tokens_decoder().items())
        if token.content not in control
    ]
    if _merges_alone_make_tokens(definition["model"], control) and _all_in(definition, kept):
        plain = _with_model_of(tokenizer, kept)
    else:
        plain = Tokenizer.from_str(json.dumps(_without(definition, control)))
    plain.no_padding()
    plain.no_truncation()
    return plain


def _merges_alone_make_tokens(model: Mapping[str, Any], control: frozenset[str]) -> bool:
    """Return whether the model is BPE in which no control token stands for a whole word or a
    single character. Its merges then make every token that it finds in text."""
    return (
        model.get("type") == "BPE"
        and not model.get("ignore_merges")
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and not any(len(token) == 1 for token in control)
    )


def _all_in(definition: Mapping[str, Any], kept: Sequence[AddedToken]) -> bool:
    """Return whether the model has these added tokens. Others would get the next free ids."""
    vocabulary = definition["model"]["vocab"]
    ids = {token["content"]: token["id"] for token in definition.get("added_tokens", ())}
    return all(vocabulary.get(token.content) == ids.get(token.content) for token in kept)


def _with_model_of(tokenizer: Tokenizer, added: Sequence[AddedToken]) -> Tokenizer:
    """Return a tokenizer that shares all but the added tokens and the post-processor."""
    plain = Tokenizer(tokenizer.model)
    if tokenizer.normalizer is not None:
        plain.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        plain.pre_tokenizer = tokenizer.pre_tokenizer
    plain.add_tokens(list(added))
    return plain


def _without(definition: Mapping[str, Any], control: frozenset[str]) -> Mapping[str, Any]:
    """Return the content of a tokenizer.json without the control tokens."""
    added = [
        token for token in definition.get("added_tokens", ()) if token["content"] not in control
    ]
    # an added token that the model does not know gets the next free id, whatever the file says
    ids = {token["content"]: token["id"] for token in added}
    model = dict(definition["model"])
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        merged = {_merged(merge) for merge in model.get("merges", ())}
        model["vocab"] = {
            token: index
            for token, index in vocabulary.items()
            if token not in control or token in merged or token == model.get("unk_token")
        } | ids
    elif vocabulary is not None:  # Unigram: pairs by id
        names = {index: token for token, index in ids.items() if index >= len(vocabulary)}
        model["vocab"] = [
            [token, _NEVER if token in control else score] for token, score in vocabulary
        ] + [
            [names.get(index, f"<no token {index}>"), _NEVER]
            for index in range(len(vocabulary), max(names, default=0) + 1)
        ]
    return {**definition, "model": model, "added_tokens": added, "post_processor": None}


def _merged(merge: str | Sequence[str]) -> str:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left + right
