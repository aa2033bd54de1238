"""Names of models, as users write them, and their meaning.

    models/small                 a directory that exists, or a GGUF file
    smollm2                      a model of the short list (short_list.toml)
    hf:owner/name[@revision]     a repository of the hub
    hf:owner/name/FILE.gguf      a file of one
    owner/name, owner/name:Q4_K_M    a repository, after a question on a terminal or with --download

A directory or file that exists comes first.
"""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from services.common.model_files.hub import HubCheckpoint, HubError
from services.common.model_files.short_list import ListedModel, listed_model, listed_models

__all__ = ["ModelNameError", "NamedModel", "find_model"]

_HUB = re.compile(r"\w[\w.-]*/\w[\w.-]*(?:/[^@]+\.gguf|:[\w.-]+)?(?:@.+)?", re.ASCII)
_PATH = ("/", "./", "../", "~")
"""Beginnings of names that mean a directory or file alone"""


class ModelNameError(Exception):
    """The name means no model. The message is one sentence."""


@dataclass(frozen=True, slots=True)
class NamedModel:
    """Meaning of a name."""

    text: str
    """Name as the user wrote it"""
    source: Path | HubCheckpoint
    """Directory or GGUF file on this machine, or what the hub has"""
    is_explicit: bool = True
    """True for a download that the name itself asks for: hf: and short names"""
    listed: ListedModel | None = None
    """Row of the short list"""

    @property
    def model_id(self) -> str:
        """Name under which clients find the model; empty = that of its directory or file."""
        if self.listed is not None:
            return self.text.lower()
        if isinstance(self.source, HubCheckpoint) and not self.is_explicit:
            return self.text.partition("@")[0]
        return ""

    def on_disk(self) -> Path | None:
        """Return the directory or GGUF file; None if the hub's cache does not have all of it."""
        return self.source if isinstance(self.source, Path) else self.source.on_disk()


def find_model(text: str) -> NamedModel:
    """Return what a name means, without asking the hub. Raises ModelNameError."""
    path = Path(text).expanduser()
    if text and path.exists():
        return NamedModel(text, path)
    if (row := listed_model(text)) is not None:
        return NamedModel(text, HubCheckpoint.parse(f"hf:{row.source}"), listed=row)
    try:
        if HubCheckpoint.is_named_by(text):
            return NamedModel(text, HubCheckpoint.parse(text))
        if _HUB.fullmatch(text) and not path.parts[0].startswith(_PATH):
            if Path(path.parts[0]).is_dir():
                raise ModelNameError(
                    f"There is no {text} on this machine; hf:{text} is that repository of the hub."
                )
            return NamedModel(text, HubCheckpoint.parse(f"hf:{text}"), is_explicit=False)
    except HubError as error:
        raise ModelNameError(str(error)) from None
    raise ModelNameError(_unknown(text))


def _unknown(text: str) -> str:
    if not text or "/" in text or text.endswith(".gguf"):
        return f"The model {text!r} does not exist: there is no such directory or GGUF file."
    names = [name for each in listed_models() for name in (each.name, *each.aliases)]
    near = difflib.get_close_matches(text.lower(), names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else "name a directory or owner/name."
    return f"There is no model {text}: {hint} `tokenwire list --available` shows all short names."
