"""Modules after the transformer in a checkpoint of sentence-transformers (modules.json)."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from services.engine.model.checkpoint.config import CheckpointError, Config

__all__ = ["DenseModule", "Pooling", "SentenceModules"]

_MODULES = "modules.json"
_OLDER_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""Flags of pooling modes before release 6"""


class Pooling(Enum):
    """Way from the hidden states of a text's tokens to one vector."""

    CLS = "cls"
    """The first token's vector"""
    MEAN = "mean"
    LAST = "last"
    """The last token's vector"""


@dataclass(frozen=True, slots=True)
class DenseModule:
    """A linear layer behind pooling."""

    directory: Path
    inputs: int
    outputs: int
    has_bias: bool
    activation: str
    """Class name of torch: "Tanh", "Identity" …"""


@dataclass(frozen=True, slots=True)
class SentenceModules:
    """Pooling and what follows it."""

    pooling: Pooling
    dense: tuple[DenseModule, ...] = ()
    normalizes: bool = False
    """Vectors have length 1"""
    skips_instructions: bool = False
    """Pooling leaves out the instruction at the beginning of a text"""

    @staticmethod
    def read(directory: Path, wanted: Pooling | None = None) -> "SentenceModules | None":
        """Read modules.json; None if there is none.

        wanted: the pooling in place of the checkpoint's; vectors have length 1 then. Raises
        CheckpointError for unknown modules, and if nothing says how to pool.
        """
        file = directory / _MODULES
        if not file.exists():
            return None if wanted is None else SentenceModules(wanted, normalizes=True)
        pooling: Pooling | None = None
        dense, normalizes, skips = [], False, False
        for kind, path in _modules(file):
            match kind:
                case "Transformer":
                    pass
                case "Pooling":
                    config = Config.read(directory / path / "config.json")
                    pooling = _pooling(config)
                    skips = not config.flag("include_prompt", True)
                case "Dense":
                    dense.append(_dense(directory / path))
                case "Normalize":
                    normalizes = True
                case _:
                    raise CheckpointError(
                        f"{file}: the module {kind} is not supported. Supported: Transformer, "
                        "Pooling, Dense, Normalize."
                    )
        if wanted is not None:
            return SentenceModules(wanted, tuple(dense), True, skips)
        if pooling is None:
            raise CheckpointError(
                f"{file} names no Pooling: models that make a vector of each token, such as "
                "ColBERT's, are not supported. --pooling chooses one."
            )
        return SentenceModules(pooling, tuple(dense), normalizes, skips)


def _modules(file: Path) -> Iterator[tuple[str, str]]:
    """Yield class and directory of each module, in order."""
    try:
        listed = json.loads(file.read_text(encoding="utf-8"))
        for each in listed:
            path = str(each["path"])
            if Path(path).name != path:
                raise CheckpointError(f"{file} names a directory outside the checkpoint.")
            yield str(each["type"]).rsplit(".", 1)[-1], path
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error!r}.") from None


def _pooling(config: Config) -> Pooling:
    if config.has("pooling_mode"):
        modes = [config.text("pooling_mode")]
    else:
        modes = [mode for key, mode in _OLDER_KEYS.items() if config.flag(key, False)]
    known = {"cls": Pooling.CLS, "mean": Pooling.MEAN, "lasttoken": Pooling.LAST}
    if len(modes) != 1 or modes[0] not in known:
        raise CheckpointError(
            f"{config.file}: the pooling {' + '.join(modes) or 'none'} is not supported. "
            f"Supported: {', '.join(known)}."
        )
    return known[modes[0]]


def _dense(directory: Path) -> DenseModule:
    config = Config.read(directory / "config.json")
    if not (directory / "model.safetensors").is_file():
        raise CheckpointError(f"{directory / 'model.safetensors'} does not exist.")
    activation = config.text("activation_function", "torch.nn.modules.activation.Tanh")
    return DenseModule(
        directory,
        config.positive("in_features"),
        config.positive("out_features"),
        config.flag("bias", True),
        activation.rsplit(".", 1)[-1],
    )
