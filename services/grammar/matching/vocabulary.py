"""The vocabulary of a checkpoint for llguidance."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from llguidance import LLTokenizer

from services.common.settings import StartupError

__all__ = ["Vocabulary", "load"]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer in llguidance's form."""

    tokenizer: LLTokenizer
    size: int
    """Number of ids; the model's logits may be wider."""
    end_ids: tuple[int, ...]
    """Ids that end a sequence for llguidance"""
    fingerprint: str
    """SHA-256 of tokenizer.json, in hex"""


def load(directory: Path) -> Vocabulary:
    """Read tokenizer.json of a checkpoint directory; raises StartupError."""
    path = directory / "tokenizer.json"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StartupError(f"Can't read {path}: {error.strerror}.") from None
    ends = _end_ids(directory)
    try:
        # without ids, llguidance looks for well-known names, and uses id 0 if it finds none
        tokenizer = LLTokenizer(str(path), eos_token=ends or None)
    except ValueError as error:
        raise StartupError(f"llguidance can't use {path}: {error}.") from None
    known = tuple(tokenizer.eos_tokens)
    if not ends and not tokenizer.is_special_token(known[0]):
        raise StartupError(f"Neither config.json nor {path} says which token ends a sequence.")
    return Vocabulary(tokenizer, tokenizer.vocab_size, known, hashlib.sha256(content).hexdigest())


def _end_ids(directory: Path) -> list[int]:
    """Return eos_token_id of generation_config.json and config.json."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise StartupError(f"Can't read {path}: {error}.") from None
        if not isinstance(config, dict):
            raise StartupError(f"{path} is not a JSON object.")
        value = config.get("eos_token_id")
        some = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) for token in some):
            raise StartupError(f"{path}: eos_token_id must be an id or a list of ids.")
        ids += some
    return list(dict.fromkeys(ids))
