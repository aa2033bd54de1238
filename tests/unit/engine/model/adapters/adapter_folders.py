"""Random LoRA adapters, made by PEFT, and the models that they change."""

import copy
import re
from pathlib import Path
from typing import cast

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

__all__ = ["layers_of", "make_adapter"]

_ELSEWHERE = "vision|visual|connector|projector|lm_head"


def layers_of(model: PreTrainedModel) -> list[str]:
    """Return the names of linear layers that adapters may change.

    For models with experts, PEFT takes the names of dense feed-forward layers for theirs too.
    """
    named = dict(model.named_modules())
    elsewhere = f"{_ELSEWHERE}|mlp" if any("experts" in name for name in named) else _ELSEWHERE
    return [
        name
        for name, module in named.items()
        if isinstance(module, nn.Linear | Conv1D) and not re.search(elsewhere, name)
    ]


def make_adapter(
    model: PreTrainedModel, folder: Path, seed: int, rank: int = 4, **settings: object
) -> PreTrainedModel:
    """Save a random adapter, of all layers unless told otherwise; return the merged model."""
    torch.manual_seed(seed)
    settings = {"target_modules": layers_of(model), "lora_alpha": 6.0} | settings
    config = LoraConfig(r=rank, init_lora_weights=False, **settings)  # type: ignore[arg-type]
    adapted = get_peft_model(copy.deepcopy(model), config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(str(folder))
    merged = cast(PreTrainedModel, adapted.merge_and_unload())
    merged.train(False)
    return merged
