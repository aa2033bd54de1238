"""Modules after the transformer in a checkpoint of sentence-transformers (modules.json)."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from services.engine.model.checkpoint.config import CheckpointError, Config

__all__ = ["DenseModule", "LexicalPooling", "Pooling", "SentenceModules"]

_MODULES = "modules.json"
_OLDER_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""Poolings by the flags that name them in files older than release 6"""


class Pooling(Enum):
    """Rule that turns the hidden states of a text's tokens into one vector."""

    CLS = "cls"
    """The first token's vector"""
    MEAN = "mean"
    LAST = "last"
    """The last token's vector"""
    TOKENS = "tokens"
    """No pooling: each token has a vector (ColBERT)"""
    LEXICAL = "lexical"
    """The weights of the vocabulary's tokens, from those of all tokens (SPLADE)"""


@dataclass(frozen=True, slots=True)
class DenseModule:
    """A linear layer after pooling, or after the states of tokens."""

    directory: Path
    inputs: int
    outputs: int
    has_bias: bool
    activation: str
    """Name of torch's class, such as "Tanh" or "Identity" """
    has_residual: bool = False
    """True if the module's input, projected to the output's width, is added to its output"""
    in_gguf: bool = False
    """True if the weight lies in the checkpoint's GGUF file, under the name of the directory"""
    reads_tokens: bool = False
    """True if the module reads tokens, whatever comes before it"""


@dataclass(frozen=True, slots=True)
class LexicalPooling:
    """Rule that turns the logits of a text's tokens into weights of the vocabulary's tokens."""

    adds: bool
    """True if weights are the sums over all tokens rather than the highest"""
    num_logarithms: int
    """Number of times that log(1 + x) is applied to a positive logit: 1 or 2"""


@dataclass(frozen=True, slots=True)
class SentenceModules:
    """Pooling and the modules that follow it."""

    pooling: Pooling
    dense: tuple[DenseModule, ...] = ()
    normalizes: bool = False
    """True if vectors have length 1"""
    skips_instructions: bool = False
    """True if pooling leaves out the instruction at the beginning of a text"""
    lexical: LexicalPooling | None = None
    """Steps by which Pooling.LEXICAL makes weights; None for other poolings"""

    @staticmethod
    def read(directory: Path, wanted: Pooling | None = None) -> "SentenceModules | None":
        """Read modules.json; None if there is none.

        wanted: pooling that replaces the checkpoint's; vectors then have length 1. Raises
        CheckpointError for unknown modules, and if neither names a pooling.
        """
        file = directory / _MODULES
        if not file.exists():
            return None if wanted is None else SentenceModules(wanted, normalizes=True)
        pooling: Pooling | None = None
        lexical: LexicalPooling | None = None
        dense, normalizes, skips, has_mask = [], False, False, False
        for package, kind, path in _modules(file):
            match kind:
                case "Transformer" | "MLMTransformer":
                    pass
                case "SpladePooling":
                    pooling = Pooling.LEXICAL
                    lexical = _lexical(Config.read(directory / path / "config.json"))
                case "Pooling":
                    config = Config.read(directory / path / "config.json")
                    pooling = _pooling(config)
                    skips = not config.flag("include_prompt", True)
                case "Dense":
                    dense.append(_dense(directory / path, _activation_of(package)))
                case "Normalize":
                    normalizes = True
                case "MultiVectorMask":  # the tokenizer service leaves tokens out
                    has_mask = True
                case _:
                    raise CheckpointError(
                        f"{file}: the module {kind} is not supported. Supported: Transformer, "
                        "Pooling, SpladePooling, Dense, MultiVectorMask, Normalize."
                    )
        if lexical is not None and dense:
            raise CheckpointError(f"{file}: a Dense beside a SpladePooling is not read.")
        if pooling is not None and any(each.reads_tokens for each in dense):
            raise CheckpointError(
                f"{file}: a Dense of token_embeddings beside a Pooling is not read."
            )
        if wanted is not None:
            return SentenceModules(wanted, tuple(dense), True, skips)
        if pooling is None and not dense and not has_mask:
            raise CheckpointError(f"{file} names no Pooling. --pooling chooses one.")
        if pooling is None:
            # PyLate gives vectors length 1 without a module
            return SentenceModules(Pooling.TOKENS, tuple(dense), normalizes or not has_mask, skips)
        return SentenceModules(pooling, tuple(dense), normalizes, skips, lexical)


def _modules(file: Path) -> Iterator[tuple[str, str, str]]:
    """Yield package, class and directory of each module, in order."""
    try:
        listed = json.loads(file.read_text(encoding="utf-8"))
        for each in listed:
            path = str(each["path"])
            if Path(path).name != path:
                raise CheckpointError(f"{file} names a directory outside the checkpoint.")
            package, _, name = str(each["type"]).partition(".")
            yield package, name.rsplit(".", 1)[-1], path
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


def _lexical(config: Config) -> LexicalPooling:
    strategy = config.text("pooling_strategy", "max")
    activation = config.text("activation_function", "relu")
    logarithms = {"relu": 1, "log1p_relu": 2}
    if strategy not in ("max", "sum") or activation not in logarithms:
        raise CheckpointError(
            f"{config.file}: the pooling_strategy {strategy} with the activation_function "
            f"{activation} is not supported. Supported: max and sum, {', '.join(logarithms)}."
        )
    return LexicalPooling(strategy == "sum", logarithms[activation])


def _activation_of(package: str) -> str:
    """Return the default activation of a package's Dense."""
    return "Identity" if package == "pylate" else "Tanh"


def _dense(directory: Path, default: str) -> DenseModule:
    config = Config.read(directory / "config.json")
    in_gguf = config.flag("in_gguf", False)
    if not (in_gguf or (directory / "model.safetensors").is_file()):
        raise CheckpointError(f"{directory / 'model.safetensors'} does not exist.")
    activation = config.text("activation_function", default)
    return DenseModule(
        directory,
        config.positive("in_features"),
        config.positive("out_features"),
        config.flag("bias", True),
        activation.rsplit(".", 1)[-1],
        config.flag("use_residual", False),
        in_gguf,
        config.text("module_input_name", "sentence_embedding") == "token_embeddings",
    )
