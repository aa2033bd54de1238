"""Roles of queries and documents in a checkpoint's files, and the scores of their vectors."""

import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.common.settings import StartupError
from services.tokenizer.embedding.text_roles import Expansion, TextRole
from services.tokenizer.model_limits import ModelLimits
from services.tokenizer.text.checkpoint_files import read_json, read_text
from services.tokenizer.text.section import Section
from services.tokenizer.text.vocabulary import Vocabulary

__all__ = ["LateInteraction"]

_CONFIG = "config_sentence_transformers.json"
_METADATA = "artifact.metadata"
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
"""Tokens of an expanded query if the checkpoint does not state a number"""
_STRATEGIES = ("fixed", "min")
"""Values of query_expansion.strategy: all queries have the length, or at least the length"""


class LateInteraction:
    """The roles of texts in the files of sentence-transformers, PyLate or colbert-ir."""

    def __init__(self, directory: Path, vocabulary: Vocabulary) -> None:
        """Read a checkpoint. Without these files, roles are plain. Raises StartupError."""
        self._vocabulary = vocabulary
        modules = _modules(directory)
        self._directory = directory
        config = Section.of_file(directory / _CONFIG)
        if _is_colbert(directory) and not modules:
            metadata = _of_metadata(Section.of_file(directory / _METADATA))
            config = replace(config, values={**metadata, **config.values})
        self._config = config
        folder = directory / modules.get("Transformer", "")
        self._transformer = Section.of_file(folder / "sentence_bert_config.json")
        self._is_pylate = any(key in config.values for key in _PYLATE_KEYS)
        self._is_pylate |= config.values.get("model_type") == "ColBERT"
        similarity = config.values.get("similarity_fn_name")
        self.averages = similarity == "meanmaxsim"
        """True if scores of token vectors are divided by the number of the query's tokens"""
        self.multiplies = "SpladePooling" in modules and similarity != "cosine"
        """True if scores of text vectors are dot products rather than cosines"""
        mask = None
        if "MultiVectorMask" in modules:
            mask = Section.of_file(directory / modules["MultiVectorMask"] / "config.json")
        skipped = self._skipped(mask)
        most, expansion = self._query_length()
        self._roles: Mapping[str, TextRole] = {
            _QUERY: TextRole(
                *self._prefix(_QUERY), most, expansion, skipped.get(_QUERY, frozenset())
            ),
            _DOCUMENT: TextRole(
                *self._prefix(_DOCUMENT),
                self._length(_DOCUMENT),
                skipped=skipped.get(_DOCUMENT, frozenset()),
            ),
        }
        for name, role in self._roles.items():
            if role.most is not None and role.most <= role.num_added + 2:
                raise StartupError(
                    f"{directory}: the length {role.most} of a {name} leaves no room for text."
                )

    @property
    def query(self) -> TextRole:
        return self._roles[_QUERY]

    @property
    def document(self) -> TextRole:
        return self._roles[_DOCUMENT]

    def role(self, prompt_name: str | None) -> TextRole | None:
        """Return the role that a prompt's name chooses; None if it is not the name of a role."""
        return None if prompt_name is None else self._roles.get(prompt_name)

    def check(self, limits: ModelLimits) -> None:
        """Raise StartupError if the model can't compute the queries of these roles."""
        expansion = self.query.expansion
        if not limits.only_tokens_have_vectors or limits.hides_ends:
            return
        if expansion is not None and not expansion.is_attended:
            raise StartupError(
                f"{self._directory} expands queries by tokens to which no token attends, "
                "which is not supported for decoders and DeBERTa. Let queries attend to them "
                "(attend_to_expansion_tokens), or do not expand them (do_query_expansion)."
            )

    def _prefix(self, role: str) -> tuple[str, int | None]:
        """Return the text before a role's texts, and the id before that text.

        A prefix of PyLate or colbert-ir is one token if the vocabulary has it as a token, with or
        without its space.
        """
        prompt = self._config.section("prompts").text(role, "")
        prefix = self._config.text(f"{role}_prefix", "")
        instruction = prompt.removeprefix(prefix)
        if not prefix.strip():
            return prefix + instruction, None
        for token in (prefix, prefix.split(None, 1)[0]):
            known = self._vocabulary.ids.get(token)
            if known is not None:
                return prefix.removeprefix(token) + instruction, known
        return prefix + instruction, None

    def _length(self, role: str) -> int | None:
        """Return the tokens to keep of a role's texts; None = the file names no length."""
        own = self._transformer.count(f"{role}_length")
        return self._config.count(f"{role}_length") if own is None else own

    def _query_length(self) -> tuple[int | None, Expansion | None]:
        """Return the tokens to keep of a query, and its expansion."""
        for settings in (self._transformer, self._config):
            if settings.has("query_expansion"):
                return self._named_expansion(settings.section("query_expansion"))
            if "query_expansion" in settings.values:  # null means that queries are not expanded
                return self._length(_QUERY), None
        config = self._config
        if not self._is_pylate or not config.flag("do_query_expansion", True):
            return self._length(_QUERY), None
        length = config.count("query_length") or _USUAL_LENGTH
        attended = config.flag("attend_to_expansion_tokens", False)
        return length, Expansion(self._expanding(config, ""), length, attended)

    def _named_expansion(self, settings: Section) -> tuple[int | None, Expansion]:
        """Return the results of `_query_length`, from the object of sentence-transformers."""
        strategy = settings.text("strategy", "")
        if strategy not in _STRATEGIES:
            raise settings.error("strategy", f"must be one of {', '.join(_STRATEGIES)}")
        length = settings.count("length")
        if length is None:
            raise settings.error("length", "is missing")
        token = self._expanding(settings, settings.text("token", ""))
        expansion = Expansion(token, length, settings.flag("attend", False))
        if strategy == "fixed":
            return length, expansion
        most = self._transformer.count("query_length")
        return None if most is None else max(most, length), expansion

    def _expanding(self, settings: Section, token: str) -> int:
        """Return the id that expands queries: `token`, or else the mask or the end of sequence."""
        if token:
            known = self._vocabulary.ids.get(token)
        elif self._vocabulary.mask_id is not None:
            known = self._vocabulary.mask_id
        else:
            known = self._vocabulary.eos_id
        if known is None:
            raise StartupError(
                f"{settings.file}: queries are expanded, but the tokenizer has no token for it."
            )
        return known

    def _skipped(self, mask: Section | None) -> Mapping[str, frozenset[int]]:
        """Return by role the ids whose vectors take no part in scores."""
        roles: Sequence[str] = [_DOCUMENT]
        if mask is None:
            usual = list(string.punctuation) if self._is_pylate else []
            words = self._config.texts("skiplist_words", usual)
        else:
            if mask.values.get("keep_only_token_ids"):
                raise mask.error("keep_only_token_ids", "is not supported")
            words = mask.texts("skiplist_words", ())
            named = mask.values.get("skiplist_tasks")
            roles = [named] if isinstance(named, str) else mask.texts("skiplist_tasks", roles)
        ids = map(self._vocabulary.ids.get, words)
        known = frozenset(token for token in ids if token is not None)
        return {role: known for role in (_QUERY, _DOCUMENT) if role in roles}


def _is_colbert(directory: Path) -> bool:
    architectures = read_json(directory / "config.json").get("architectures")
    return isinstance(architectures, list) and "HF_ColBERT" in architectures


def _modules(directory: Path) -> Mapping[str, str]:
    """Return the folder of each module by its class, empty without modules.json."""
    path = directory / "modules.json"
    try:
        listed = json.loads(read_text(path) or "[]")
    except ValueError as error:
        raise StartupError(f"{path} is not JSON: {error}.") from None
    match listed:
        case [*modules] if all(isinstance(each, dict) for each in modules):
            entries = [(each.get("type"), each.get("path")) for each in modules]
            if all(isinstance(part, str) for entry in entries for part in entry):
                return {kind.rsplit(".", 1)[-1]: folder for kind, folder in entries}
    raise StartupError(f"{path} must be a list of objects with the texts type and path.")


def _of_metadata(metadata: Section) -> dict[str, Any]:
    """Return the settings of colbert-ir's artifact.metadata under PyLate's names."""
    masks = metadata.flag("mask_punctuation", True)
    return {
        "query_prefix": f"{metadata.text('query_token_id', '[unused0]')} ",
        "document_prefix": f"{metadata.text('doc_token_id', '[unused1]')} ",
        "query_length": metadata.count("query_maxlen"),
        "document_length": metadata.count("doc_maxlen"),
        "attend_to_expansion_tokens": metadata.flag("attend_to_mask_tokens", False),
        "skiplist_words": list(string.punctuation) if masks else [],
    }
