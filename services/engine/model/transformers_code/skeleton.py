"""A model of transformers without weights, built from config.json."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging

from services.engine.deferred_modules import load_meta_kernels
from services.engine.model.checkpoint.config import CheckpointError, Config
from services.engine.model.checkpoint.model_code import architecture_in_transformers
from services.engine.model.transformers_code.calls import TRIAL
from services.engine.model.transformers_code.experts import EXPERTS
from services.engine.model.transformers_code.refusal import refusal

__all__ = ["build_skeleton", "text_config"]

_ATTENTION = frozenset({"full_attention", "sliding_attention", "attention"})
_OVER_TOKENS = (nn.Conv1d, nn.RNNBase)
"""Modules that combine the tokens of a sequence"""
_OF_DECODERS = frozenset({"attn_config", "ffn_config", "text_config"})
"""Parts of a config that describe the decoder; others describe towers"""
_UNUSED = frozenset({"auto_map", "quantization_config", "torch_dtype", "dtype"})
"""Keys of config.json that the modules don't need"""


def build_skeleton(config: Config, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model of a config.json on the device "meta".

    No code of a checkpoint runs. Raises CheckpointError for an architecture that can't be served.
    """
    architecture = architecture_in_transformers(config)
    kind = _config_class(config)
    if (reason := _reason_of_class(kind, architecture)) is not None:
        raise refusal(config.file, architecture, reason)
    parsed = _parsed(config, kind, architecture)
    if (reason := _reason(parsed)) is not None:
        raise refusal(config.file, architecture, reason)
    load_meta_kernels()
    try:
        with _quiet(), torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                parsed,
                dtype=dtype,
                attn_implementation=TRIAL,
                experts_implementation=EXPERTS,
                trust_remote_code=False,
            )
    except (AttributeError, ImportError, KeyError, TypeError, ValueError) as error:
        raise refusal(config.file, architecture, f"it can't be built ({error})") from error
    if any(isinstance(module, _OVER_TOKENS) for module in model.modules()):
        raise refusal(config.file, architecture, "convolutions or recurrences combine tokens")
    model.eval()  # type: ignore[no-untyped-call]
    return model


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Return the config of a model's decoder."""
    found: PreTrainedConfig = model.config.get_text_config(decoder=True)
    return found


def _config_class(config: Config) -> type[PreTrainedConfig]:
    model_type = config.text("model_type")
    if model_type not in CONFIG_MAPPING:
        raise CheckpointError(
            f"{config.file}: the installed transformers does not know the model_type {model_type}."
        )
    kind: type[PreTrainedConfig] = CONFIG_MAPPING[model_type]
    return kind


def _reason_of_class(kind: type[PreTrainedConfig], architecture: str) -> str | None:
    """Return why no model of this kind is served, a clause; None if there is no reason."""
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(kind, None)
    if getattr(model, "__name__", "") != architecture:
        return "it is no model that continues texts"
    if set(kind.sub_configs) - _OF_DECODERS:
        return "it reads more than text"
    return "its layers are recurrent" if model._is_stateful else None


def _parsed(config: Config, kind: type[PreTrainedConfig], architecture: str) -> PreTrainedConfig:
    values = {key: value for key, value in config.values.items() if key not in _UNUSED}
    try:
        with _quiet():
            parsed: PreTrainedConfig = kind.from_dict(values)
    except Exception as error:  # validation of huggingface_hub, and any check of a config
        reason = f"transformers does not accept its config ({_one_line(error)})"
        raise refusal(config.file, architecture, reason) from error
    return parsed


def _reason(config: PreTrainedConfig) -> str | None:
    """Return why a model is not served, a clause; None if there is no reason yet."""
    if config.is_encoder_decoder:
        return "it is an encoder with a decoder"
    text = config.get_text_config(decoder=True)
    kinds = {kind for kind in getattr(text, "layer_types", None) or () if kind not in _ATTENTION}
    if kinds:
        return f"it has layers of the type {', '.join(sorted(map(str, kinds)))}"
    if "longrope" in str(getattr(text, "rope_parameters", None)):
        return "its rotation (longrope) depends on the other sequences of a step"
    return None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' log about configs, whose errors are raised."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(level)
