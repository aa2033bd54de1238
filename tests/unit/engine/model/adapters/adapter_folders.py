"""Random LoRA adapters, made by PEFT, and the models that they change."""

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast
from unittest.mock import patch

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

__all__ = ["AdaptedModel", "layers_of", "make_adapter", "make_separate_adapter"]

_ELSEWHERE = "vision|visual|connector|projector|lm_head|_coefs|shared_transf"
_REFUSED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("falcon_h1", "mamba2", "nemotron_h"), ("out_proj",)),
    **dict.fromkeys(("falcon_mamba", "mamba"), ("dt_proj", "out_proj")),
    "jamba": ("dt_proj",),
    "lara_mini": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
}
"""Layers that PEFT refuses, that transformers multiplies without their adapters, or that are one
tensor in files, by the model's type"""


def layers_of(model: PreTrainedModel) -> list[str]:
    """Return the names of linear layers that adapters may change.

    For models with experts, PEFT takes the names of dense feed-forward layers for theirs too.
    """
    named = dict(model.named_modules())
    refused = _REFUSED.get(model.config.model_type)
    elsewhere = f"{_ELSEWHERE}|mlp" if any("experts" in name for name in named) else _ELSEWHERE
    return [
        name
        for name, module in named.items()
        if isinstance(module, nn.Linear | Conv1D) and not re.search(elsewhere, name)
        if refused is None or not name.endswith(refused)
    ]


def make_adapter(
    model: PreTrainedModel, folder: Path, seed: int, rank: int = 4, **settings: object
) -> PreTrainedModel:
    """Save a random adapter, of all layers unless told otherwise; return the merged model."""
    adapted = AdaptedModel(copy.deepcopy(model), rank, **settings)
    adapted.make(folder, seed)
    return adapted.merge()


class AdaptedModel:
    """A model that PEFT has given the layers of an adapter, for several adapters in turn.

    It changes the model it is given. rank and settings: those of `make_adapter`.
    """

    def __init__(self, model: PreTrainedModel, rank: int = 4, **settings: object) -> None:
        settings = {"target_modules": layers_of(model), "lora_alpha": 6.0} | settings
        config = LoraConfig(r=rank, init_lora_weights=False, **settings)  # type: ignore[arg-type]
        self._model = cast(PeftModel, get_peft_model(model, config))
        model.train(False)

    def make(self, folder: Path, seed: int) -> None:
        """Save a random adapter."""
        torch.manual_seed(seed)
        for name, parameter in self._model.named_parameters():
            if "lora_" in name:
                nn.init.normal_(parameter, std=0.1)
        with patch.object(PeftModel, "create_or_update_model_card"):  # half of the time of a save
            self._model.save_pretrained(str(folder))

    @contextmanager
    def merged(self) -> Iterator[PreTrainedModel]:
        """Yield the model, whose weights contain the latest adapter meanwhile."""
        weights = {name: each.data.clone() for name, each in self._model.named_parameters()}
        self._model.merge_adapter()
        yield cast(PreTrainedModel, self._model.get_base_model())
        self._model.unmerge_adapter()
        for name, parameter in self._model.named_parameters():  # a difference would be rounded
            parameter.data.copy_(weights[name])

    def merge(self) -> PreTrainedModel:
        """Return the model, whose weights contain the latest adapter from now on."""
        merged = cast(PreTrainedModel, self._model.merge_and_unload())
        merged.train(False)
        return merged


def make_separate_adapter(
    model: PreTrainedModel, checkpoint: Path, folder: Path, seed: int, rank: int = 4
) -> PreTrainedModel:
    """Save a random adapter with a module for each expert, as of transformers 4.

    checkpoint: the model's folder, which has the names of transformers 4. Returns the model that
    PEFT merges, which stacks the experts' modules to do so.
    """
    torch.manual_seed(seed)
    weights = load_file(checkpoint / "model.safetensors")
    layers = {
        name.removesuffix(".weight"): weight.shape
        for name, weight in weights.items()
        if weight.ndim == 2 and re.search(r"self_attn|experts|\.gate\.", name)
    }
    tensors = {}
    for name, (outputs, inputs) in layers.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, inputs) / 10
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, rank) / 10
    targets = sorted({name.rpartition(".")[2] for name in layers})
    config = LoraConfig(r=rank, lora_alpha=6, target_modules=targets, task_type="CAUSAL_LM")
    config.save_pretrained(str(folder))
    save_file(tensors, folder / "adapter_model.safetensors")
    adapted = PeftModel.from_pretrained(copy.deepcopy(model), str(folder))
    merged = cast(PreTrainedModel, adapted.merge_and_unload())
    merged.train(False)
    return merged
