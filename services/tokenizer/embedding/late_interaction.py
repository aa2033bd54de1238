"""How a checkpoint encodes queries and documents whose tokens have vectors, and scores them."""

import json
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common.settings import StartupError
from services.tokenizer.embedding.text_roles import Expansion, TextRole
from services.tokenizer.text.checkpoint_files import read_json, read_text
from services.tokenizer.text.vocabulary import Vocabulary

__all__ = ["LateInteraction"]

_CONFIG = "config_sentence_transformers.json"
_QUERY, _DOCUMENT = "query", "document"
_PYLATE_KEYS = (
    "query_length",
    "document_length",
    "query_prefix",
    "document_prefix",
    "do_query_expansion",
    "attend_to_expansion_tokens",
    "skiplist_words",
)
_USUAL_LENGTH = 32
"""Tokens of an expanded query where the checkpoint does not say"""


class LateInteraction:
    """The roles of texts in the files of sentence-transformers, PyLate or colbert-ir."""

    def __init__(self, directory: Path, vocabulary: Vocabulary) -> None:
        """Read a checkpoint; one without these files has plain roles. Raises StartupError."""
        self._vocabulary = vocabulary
        self._file = directory / _CONFIG
        config, listed = read_json(self._file), _modules(directory)
        if _is_colbert(directory) and not listed:
            self._file = directory / "artifact.metadata"
            config = {**_of_metadata(read_json(self._file)), **config}
        self._config = config
        self._is_pylate = any(key in config for key in _PYLATE_KEYS)
        self._is_pylate |= config.get("model_type") == "ColBERT"
        transformer = read_json(
            directory / listed.get("Transformer", "") / "sentence_bert_config.json"
        )
        mask = None
        if "MultiVectorMask" in listed:
            mask = read_json(directory / listed["MultiVectorMask"] / "config.json")
        self.averages = config.get("similarity_fn_name") == "meanmaxsim"
        """Scores are divided by the number of the query's tokens"""
        skipped = self._skipped(mask)
        expansion = self._expansion(transformer)
        length = self._integer(transformer, "query_length")
        most = self._integer(config, "query_length") if length is None else length
        if expansion is not None:
            is_fixed, expanded = expansion
            floor = expanded.length
            most = floor if is_fixed else None if length is None else max(length, floor)
        document_length = self._integer(transformer, "document_length")
        if document_length is None:
            document_length = self._integer(config, "document_length")
        self._roles: Mapping[str, TextRole] = {
            _QUERY: TextRole(
                *self._prefix(_QUERY),
                most,
                None if expansion is None else expansion[1],
                skipped.get(_QUERY, frozenset()),
            ),
            _DOCUMENT: TextRole(
                *self._prefix(_DOCUMENT),
                document_length,
                skipped=skipped.get(_DOCUMENT, frozenset()),
            ),
        }
        for name, role in self._roles.items():
            if role.most is not None and role.most <= role.num_added + 2:
                raise StartupError(
                    f"{self._file}: {name}_length {role.most} leaves no room for text."
                )

    @property
    def query(self) -> TextRole:
        return self._roles[_QUERY]

    @property
    def document(self) -> TextRole:
        return self._roles[_DOCUMENT]

    def role(self, prompt_name: str | None) -> TextRole | None:
        """Return the role that a prompt's name chooses; None = it chooses none."""
        return None if prompt_name is None else self._roles.get(prompt_name)

    def _prefix(self, role: str) -> tuple[str, int | None]:
        """Return the text before a role's texts, and the id before that.

        A prefix of PyLate or colbert-ir is one token if the vocabulary has it, with its space or
        without.
        """
        prompts = self._config.get("prompts") or {}
        prompt = str(prompts.get(role) or "") if isinstance(prompts, dict) else ""
        prefix = self._text(f"{role}_prefix")
        if not prefix.strip():
            return prefix + prompt.removeprefix(prefix), None
        rest = prompt.removeprefix(prefix)
        for token in (prefix, prefix.split(None, 1)[0]):
            known = self._vocabulary.ids.get(token)
            if known is not None:
                return prefix.removeprefix(token) + rest, known
        return prefix + rest, None

    def _expansion(self, transformer: Mapping[str, Any]) -> tuple[bool, Expansion] | None:
        """Return whether the length is that of all queries, and the expansion; None without one."""
        if "query_expansion" in transformer or "query_expansion" in self._config:
            found = transformer.get("query_expansion", self._config.get("query_expansion"))
            if found is None:
                return None
            if not isinstance(found, dict):
                raise StartupError(f"{self._file}: query_expansion must be an object.")
            length = self._integer(found, "length")
            if length is None:
                raise StartupError(f"{self._file}: query_expansion lacks length.")
            token = self._expanding(found.get("token"))
            is_fixed = found.get("strategy") != "min"
            return is_fixed, Expansion(token, length, bool(found.get("attend", False)))
        if not self._is_pylate or self._config.get("do_query_expansion") is False:
            return None
        length = self._integer(self._config, "query_length") or _USUAL_LENGTH
        attended = bool(self._config.get("attend_to_expansion_tokens", False))
        return True, Expansion(self._expanding(None), length, attended)

    def _expanding(self, token: object) -> int:
        """Return the id that expands queries: by default the mask, or the end of sequence."""
        if token is not None:
            known = self._vocabulary.ids.get(str(token))
        elif self._vocabulary.mask_id is not None:
            known = self._vocabulary.mask_id
        else:
            known = self._vocabulary.eos_id
        if known is None:
            raise StartupError(
                f"{self._file}: queries are expanded, but the tokenizer has no token for it."
            )
        return known

    def _skipped(self, mask: Mapping[str, Any] | None) -> Mapping[str, frozenset[int]]:
        """Return by role the ids whose vectors take no part in scores."""
        words: object = self._config.get("skiplist_words")
        roles: object = [_DOCUMENT]
        if mask is not None:
            if mask.get("keep_only_token_ids"):
                raise StartupError(f"{self._file.parent}: keep_only_token_ids is not supported.")
            words, roles = mask.get("skiplist_words") or [], mask.get("skiplist_tasks") or roles
        elif words is None:
            words = list(string.punctuation) if self._is_pylate else []
        if not isinstance(words, list) or not isinstance(roles, list | str):
            raise StartupError(f"{self._file}: skiplist_words must be a list of texts.")
        ids = (self._vocabulary.ids.get(str(word)) for word in words)
        known = frozenset(token for token in ids if token is not None)
        return {role: known for role in (_QUERY, _DOCUMENT) if role in roles}

    def _integer(self, config: Mapping[str, Any], key: str) -> int | None:
        value = config.get(key)
        if value is None:
            return None
        if type(value) is not int or value < 1:
            raise StartupError(f"{self._file}: {key} must be a positive integer.")
        return value

    def _text(self, key: str) -> str:
        value = self._config.get(key) or ""
        if not isinstance(value, str):
            raise StartupError(f"{self._file}: {key} must be a text.")
        return value


def _is_colbert(directory: Path) -> bool:
    architectures = read_json(directory / "config.json").get("architectures")
    return isinstance(architectures, list) and "HF_ColBERT" in architectures


def _modules(directory: Path) -> Mapping[str, str]:
    """Return the folder of each module by its class, empty without modules.json."""
    try:
        listed = json.loads(read_text(directory / "modules.json") or "[]")
        return {str(each["type"]).rsplit(".", 1)[-1]: str(each["path"]) for each in listed}
    except (ValueError, KeyError, TypeError) as error:
        raise StartupError(f"{directory / 'modules.json'} cannot be read: {error!r}.") from None


def _of_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return what colbert-ir's artifact.metadata says, under PyLate's names."""
    punctuation = list(string.punctuation) if metadata.get("mask_punctuation", True) else []
    return {
        "query_prefix": f"{metadata.get('query_token_id') or '[unused0]'} ",
        "document_prefix": f"{metadata.get('doc_token_id') or '[unused1]'} ",
        "query_length": metadata.get("query_maxlen"),
        "document_length": metadata.get("doc_maxlen"),
        "attend_to_expansion_tokens": bool(metadata.get("attend_to_mask_tokens")),
        "skiplist_words": punctuation,
    }
