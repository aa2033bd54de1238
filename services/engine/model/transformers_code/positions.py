"""Positions of a pass's tokens, which are given to models that would count them."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from services.engine.model.transformers_code.refusal import UnsupportedError

__all__ = ["Positions"]


class Positions:
    """The positions that a model reads: an argument of its layers or of embeddings inside them, or
    the source of biases in its attention.

    Layers of BART's kind count the tokens of a pass and of their cache, and pass the numbers on.
    Here their embeddings get the positions instead.
    """

    def __init__(self, model: PreTrainedModel, *, has_biases: bool) -> None:
        """Raises UnsupportedError if the model can't be told positions.

        has_biases: True if the model's attention reads `current`.
        """
        self._positions: Tensor | None = None
        self._is_argument = _takes_positions(model.base_model)
        counting = [each for each in model.base_model.modules() if _embeds_positions(each)]
        if self._is_argument:
            return
        if not counting and not has_biases:
            raise UnsupportedError("its layers take no positions")
        for module in counting:
            module.forward = functools.partial(self._embed, module.forward)

    @property
    def current(self) -> Tensor:
        """The positions [tokens] of the running pass."""
        assert self._positions is not None
        return self._positions

    def arguments(self, positions: Tensor) -> Mapping[str, Tensor]:
        """Return the arguments of a pass with these positions [1, tokens]."""
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
