"""Plan of a model on transformers' modules, which is made before its weights are read."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from services.engine.kernels.tiles import TILE
from services.engine.model.architecture.activation import SWIGLU
from services.engine.model.architecture.layers import DenseSpec, LayerSpec
from services.engine.model.architecture.spec import ModelSpec, dtype_of, quantization_of
from services.engine.model.checkpoint.config import Config
from services.engine.model.checkpoint.family import Family
from services.engine.model.checkpoint.fp8 import Fp8Format
from services.engine.model.checkpoint.schemes import Scheme
from services.engine.model.transformers_code.division import divide, require_divided_heads
from services.engine.model.transformers_code.experts import experts_of
from services.engine.model.transformers_code.gated import GatedLayer, replace_gated
from services.engine.model.transformers_code.inline_attention import has_biases, lead_to_interface
from services.engine.model.transformers_code.linear import ProjectedLinear, replace_linears
from services.engine.model.transformers_code.positions import Positions
from services.engine.model.transformers_code.refusal import UnsupportedError, refusal
from services.engine.model.transformers_code.skeleton import build_skeleton, text_config
from services.engine.model.transformers_code.trial import TRIAL_TOKENS, Trial, try_pass

__all__ = ["ModelPlan"]

_CONTEXT_KEYS = (
    "max_position_embeddings",
    "max_sequence_length",
    "max_seq_len",
    "max_target_positions",
    "n_positions",
    "seq_length",
)


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A model without weights."""

    spec: ModelSpec
    """Shape of the model; each layer is one call of attention"""
    model: PreTrainedModel
    """Modules on the device "meta", with `linears` and `gated` in place of layers"""
    linears: dict[str, ProjectedLinear]
    """Linear layers by name"""
    gated: dict[str, GatedLayer]
    """Feed-forward layers by name, each in place of three of `linears`"""
    experts: dict[str, nn.Module]
    """Modules of experts, by name"""
    callers: tuple[nn.Module, ...]
    """The module of each call of attention in a pass"""
    positions: Positions

    def takes_adapters(self, name: str) -> bool:
        """Return whether a linear layer reads one row for each token of a step.

        A pass knows the adapter of each token, and not of other rows, such as those of a head.
        """
        return self.linears[name].trial_rows == {TRIAL_TOKENS}

    @staticmethod
    def of(config: Config, dtype: torch.dtype, ranks: int = 1) -> "ModelPlan":
        """Plan a rank's part of the model of a config.json.

        Raises CheckpointError if it can't be served.
        """
        model = build_skeleton(config, dtype)
        architecture = type(model).__name__
        linears = replace_linears(model)
        gated = replace_gated(model)
        try:
            if model.base_model is model:
                raise UnsupportedError("its layers and its output are one module")
            positions = Positions(model, has_biases=has_biases(model))
            lead_to_interface(model, positions)
            trial = try_pass(model, positions)
            if ranks > 1:
                trial = _divided(model, linears, positions, trial, ranks)
            text, offset = text_config(model), _position_offset(model)
            family = Family(architecture)
            stored_as = quantization_of(config, family)
            width = _width(linears, text.hidden_size)
            content = DenseSpec(width, SWIGLU, has_bias=False)
            layers = tuple(LayerSpec(mixer, content) for mixer in trial.layers)
            spec = ModelSpec(
                family=family,
                vocab_size=_vocab_size(model, text),
                context_length=_context_length(text) - offset,
                hidden_size=text.hidden_size,
                layers=layers,
                norm_epsilon=1.0,
                tied_embeddings=False,
                logit_cap=0.0,
                embedding_scale=1.0,
                residual_scale=1.0,
                logit_scale=1.0,
                parallel_residual=False,
                head_bias=False,
                dtype=dtype_of(config),
                fp8=stored_as if isinstance(stored_as, Fp8Format) else None,
                scheme=stored_as if isinstance(stored_as, Scheme) else None,
                eos_token_ids=_ids(getattr(text, "eos_token_id", None)),
                bos_token_id=next(iter(_ids(getattr(text, "bos_token_id", None))), None),
                position_offset=offset,
            )
        except UnsupportedError as error:
            raise refusal(config.file, architecture, str(error)) from error
        modules = tuple(trial.modules)
        return ModelPlan(spec, model, linears, gated, experts_of(model), modules, positions)


def _divided(
    model: PreTrainedModel,
    linears: dict[str, ProjectedLinear],
    positions: Positions,
    whole: Trial,
    ranks: int,
) -> Trial:
    """Divide a model among ranks. Return the calls of attention in a pass of one rank."""
    if has_biases(model):
        raise UnsupportedError(f"its biases of attention can't be divided among {ranks} ranks")
    divide(model, linears, ranks)
    try:
        part = try_pass(model, positions)
    except UnsupportedError as error:
        raise UnsupportedError(f"its tp_plan fails for {ranks} ranks: {error}") from error
    require_divided_heads(whole.layers, part.layers, ranks)
    return part


def _width(linears: dict[str, ProjectedLinear], hidden_size: int) -> int:
    """Return a linear layer's number of inputs, if possible one that does not fit tiles."""
    odd = (each.in_features for each in linears.values() if each.in_features % TILE)
    return next(odd, hidden_size)


def _vocab_size(model: PreTrainedModel, text: PreTrainedConfig) -> int:
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return head.outputs if isinstance(head, ProjectedLinear) else int(text.vocab_size)


def _context_length(text: PreTrainedConfig) -> int:
    for key in _CONTEXT_KEYS:
        value = getattr(text, key, None)
        if isinstance(value, int) and value > 0:
            return value
    raise UnsupportedError("config.json states no context length (max_position_embeddings)")


def _position_offset(model: nn.Module) -> int:
    """Return the first position, which follows the padding's in models of RoBERTa's kind."""
    for module in model.modules():
        padding = getattr(module, "padding_idx", None)
        if hasattr(module, "create_position_ids_from_input_ids") and padding is not None:
            return int(padding) + 1
    return 0


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)
