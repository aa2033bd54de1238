"""Positions of a pass's tokens, told to models that would count them."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from services.engine.model.transformers_code.refusal import UnsupportedError

__all__ = ["Positions"]


class Positions:
    """The positions that a model reads: an argument of its layers, or of embeddings inside them.

    Layers of BART's kind count the tokens of a pass and of their cache, and pass the numbers on.
    Their embeddings are told the positions here instead.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises UnsupportedError if the model can't be told positions."""
        self._positions: Tensor | None = None
        self._is_argument = _takes_positions(model.base_model)
        counting = [each for each in model.base_model.modules() if _embeds_positions(each)]
        if not self._is_argument:
            if not counting:
                raise UnsupportedError("its layers take no positions")
            for module in counting:
                module.forward = functools.partial(self._embed, module.forward)

    def arguments(self, positions: Tensor) -> Mapping[str, Tensor]:
        """Return the arguments of a pass that tell its positions [1, tokens]."""
        if self._is_argument:
            return {"position_ids": positions}
        self._positions = positions[0]
        return {}

    def _embed(self, embed: Callable[..., Tensor], shape: Any, *_: Any, **__: Any) -> Tensor:
        return embed(shape, position_ids=self._positions)


def _takes_positions(module: nn.Module) -> bool:
    return "position_ids" in inspect.signature(module.forward).parameters


def _embeds_positions(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding) and _takes_positions(module)
