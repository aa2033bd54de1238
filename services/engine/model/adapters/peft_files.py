"""LoRA adapters in the directories that PEFT writes."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.engine.model.checkpoint.config import CheckpointError, Config

__all__ = ["LowRankPair", "PeftAdapter"]

_CONFIG = "adapter_config.json"
_TENSORS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
_WRAPPED = ".base_layer"
"""Suffix of a module's name, repeated for each further parameter of it that has an adapter"""
_EXPERTS = ".experts"
_STACKS = ("gate_up_proj", "down_proj")
"""Parameters that stack the weights of all experts, in the order in which PEFT wraps them"""
_UNSUPPORTED = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "lora_bias": "biases of adapters",
    "modules_to_save": "whole modules beside the adapter",
    "trainable_token_indices": "trained tokens",
    "layer_replication": "repeated layers",
    "alora_invocation_tokens": "activated LoRA",
    "megatron_config": "Megatron's layers",
}
"""Keys of adapter_config.json that must be absent, null, false or empty"""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
"""Initialisations that also change the base model's weights"""


@dataclass(frozen=True, slots=True)
class LowRankPair:
    """Addition of an adapter to a linear layer: scale * (up @ down)."""

    down: Tensor
    """[rank, inputs]"""
    up: Tensor
    """[outputs, rank]"""
    scale: float


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """The adapter of one directory."""

    pairs: Mapping[str, LowRankPair]
    """Pairs by the name of the base model's linear layer, or of the parameter of all experts"""

    @property
    def num_elements(self) -> int:
        """Number of elements of all its tensors."""
        return sum(pair.down.numel() + pair.up.numel() for pair in self.pairs.values())

    @staticmethod
    def read(directory: Path) -> "PeftAdapter":
        """Read an adapter; its tensors are views of the mapped file. Raises CheckpointError."""
        if not directory.is_dir():
            raise CheckpointError(f"{directory} is not a directory.")
        config = Config.read(directory / _CONFIG)
        _check(config)
        tensors = _tensors(directory / _TENSORS)
        names = _Names(config, [name for name in tensors if name.endswith(_DOWN)])
        pairs = {}
        for name in sorted(tensors):
            if name.endswith(_DOWN):
                layer, parameter = names.of(name)
                scale = _scale(config, parameter)
                pairs[layer] = _pair(directory / _TENSORS, name, tensors, scale)
            elif not name.endswith(_UP):
                raise CheckpointError(
                    f"{directory / _TENSORS}: {name} is not a part of a LoRA adapter of linear "
                    "layers, which alone are supported."
                )
        ups = (name.removesuffix(_UP) for name in tensors if name.endswith(_UP))
        if lone := [name for name in ups if name + _DOWN not in tensors]:
            raise CheckpointError(f"{directory / _TENSORS}: {lone[0]} has no lora_A.")
        if not pairs:
            raise CheckpointError(f"{directory / _TENSORS} holds no adapter.")
        return PeftAdapter(pairs)


class _Names:
    """Names of layers and parameters, from the names of an adapter's tensors."""

    def __init__(self, config: Config, tensors: Sequence[str]) -> None:
        self._file = config.file
        self._tensors = frozenset(tensors)
        has_targets = config.has("target_parameters")
        self._targets = config.texts("target_parameters") if has_targets else ()

    def of(self, tensor: str) -> tuple[str, str]:
        """Return the name of the layer or stack, and the name that patterns are matched with.

        Raises CheckpointError if the parameter is not a known stack.
        """
        layer = tensor.removesuffix(_DOWN)
        module = re.sub(rf"({re.escape(_WRAPPED)})+$", "", layer)
        name = module.removeprefix(_PREFIX)
        if not module.endswith(_EXPERTS):
            whole = f"{name}.weight"
            return layer.removeprefix(_PREFIX), whole if self._is_target(whole) else name
        stacks = [stack for stack in _STACKS if self._is_target(f"{name}.{stack}")]
        wrappers = [f"{module}{_WRAPPED * depth}" for depth in reversed(range(len(stacks)))]
        beyond = f"{module}{_WRAPPED * len(stacks)}{_DOWN}"
        if layer not in wrappers or beyond in self._tensors:
            raise CheckpointError(
                f"{self._file}: of the parameters of {name}, target_parameters may name "
                f"{' and '.join(_STACKS)} alone."
            )
        stack = f"{name}.{stacks[wrappers.index(layer)]}"
        return stack, stack

    def _is_target(self, parameter: str) -> bool:
        return any(f".{parameter}".endswith(f".{target}") for target in self._targets)


def _check(config: Config) -> None:
    """Raise CheckpointError for an adapter that is not plain LoRA."""
    kind = config.text("peft_type", "")
    if kind != "LORA":
        raise CheckpointError(f"{config.file}: peft_type must be LORA, got {kind or 'none'}.")
    for key, words in _UNSUPPORTED.items():
        if config.values.get(key):
            raise CheckpointError(f"{config.file}: {key} is set, and {words} are not supported.")
    if config.text("bias", "none") != "none":
        raise CheckpointError(f"{config.file}: bias must be none.")
    start = config.values.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_CHANGES_BASE):
        raise CheckpointError(
            f"{config.file}: init_lora_weights {start} has changed the base model's weights too. "
            "Save the adapter with path_initial_model_for_weight_conversion."
        )


def _scale(config: Config, name: str) -> float:
    """Return the factor on the product of a layer or parameter."""
    rank = _of_pattern(config, "rank_pattern", name, config.positive("r"))
    alpha = _of_pattern(config, "alpha_pattern", name, config.number("lora_alpha"))
    return alpha / (math.sqrt(rank) if config.flag("use_rslora", False) else rank)


def _of_pattern(config: Config, key: str, name: str, default: float) -> float:
    """Return the layer's own number under `key`, an object of patterns for the ends of names."""
    patterns = config.values.get(key) or {}
    if not isinstance(patterns, dict):
        raise CheckpointError(f"{config.file}: {key} must be an object.")
    for pattern, value in patterns.items():
        try:
            matches = re.match(rf"(.*\.)?({pattern})$", name)
        except re.error:
            raise CheckpointError(
                f"{config.file}: {pattern!r} in {key} is no regular expression."
            ) from None
        if matches:
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise CheckpointError(f"{config.file}: {key} must hold positive numbers.")
            return value
    return default


def _tensors(file: Path) -> Mapping[str, Tensor]:
    if not file.is_file():
        raise CheckpointError(f"{file} does not exist.")
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged or truncated: {error}.") from None


def _pair(file: Path, name: str, tensors: Mapping[str, Tensor], scale: float) -> LowRankPair:
    down, up = tensors[name], tensors.get(name.removesuffix(_DOWN) + _UP)
    if up is None:
        raise CheckpointError(f"{file}: {name} has no lora_B beside it.")
    floating = down.is_floating_point() and up.is_floating_point()
    if not floating or down.dim() != 2 or up.dim() != 2 or down.shape[0] != up.shape[1]:
        raise CheckpointError(
            f"{file}: {name} has the shape {list(down.shape)}, which does not fit its lora_B of "
            f"shape {list(up.shape)}."
        )
    return LowRankPair(down, up, scale)
