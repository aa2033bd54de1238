"""Prompts that a checkpoint of sentence-transformers puts before texts."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.common.settings import StartupError
from services.tokenizer.text.checkpoint_files import read_json
from services.tokenizer.text.vocabulary import Vocabulary
from tokenwire.errors import invalid

__all__ = ["SentencePrompt", "SentencePrompts"]

_FILE = "config_sentence_transformers.json"
_ALWAYS = ("query", "document")  # sentence-transformers knows them for any model


@dataclass(frozen=True, slots=True)
class SentencePrompt:
    """A text that goes before others."""

    text: str
    length: int
    """Number of the prompt's tokens, with the special tokens before it"""

    @staticmethod
    def of(text: str, vocabulary: Vocabulary) -> "SentencePrompt | None":
        """Return the prompt of a text; None if it is empty."""
        return SentencePrompt(text, _length(text, vocabulary)) if text else None


class SentencePrompts:
    """The prompts of a checkpoint, by name."""

    def __init__(self, directory: Path, vocabulary: Vocabulary) -> None:
        """Read the prompts. Without the file, they are empty. Raises StartupError."""
        config = read_json(directory / _FILE)
        listed = config.get("prompts") or {}
        default = config.get("default_prompt_name")
        if not isinstance(listed, dict) or not all(
            isinstance(text, str | None) for text in listed.values()
        ):
            raise StartupError(f"{directory / _FILE}: prompts must be texts by name.")
        texts: Mapping[str, str | None] = {**dict.fromkeys(_ALWAYS), **listed}
        if default is not None and default not in list(texts):
            raise StartupError(
                f"{directory / _FILE}: default_prompt_name {default!r} is none of its prompts "
                f"({', '.join(texts)})."
            )
        self._prompts = {
            name: SentencePrompt.of(text or "", vocabulary) for name, text in texts.items()
        }
        self._default = None if default is None else self._prompts[default]

    def named(self, name: str | None) -> SentencePrompt | None:
        """Return a prompt; None if it is empty. name: None = the default.

        Raises INVALID_ARGUMENT for an unknown name.
        """
        if name is None:
            return self._default
        if name not in self._prompts:
            known = ", ".join(self._prompts)
            raise invalid("prompt_name", f"The model has no prompt of this name. It has: {known}.")
        return self._prompts[name]


def _length(text: str, vocabulary: Vocabulary) -> int:
    """Return the number of tokens, without a special token at the end.

    sentence-transformers counts them in the same way.
    """
    [framed] = vocabulary.encode_framed([text])
    ends = bool(framed.ids) and framed.ids[-1] in vocabulary.special_tokens
    return len(framed.ids) - ends
