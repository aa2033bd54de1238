"""A model on transformers' modules on rank 0 of several."""

from typing import Any

from torch import Tensor

from services.engine.model.lockstep import Announcements
from services.engine.model.transformers_code.paged_model import TransformersModel
from services.engine.ranks.group import RankGroup

__all__ = ["LeadingModel"]


class LeadingModel(Announcements, TransformersModel):
    """Model of rank 0, which has the other ranks compute each call along with it."""

    def __init__(self, ranks: RankGroup, *arguments: Any) -> None:
        """arguments: arguments of `TransformersModel`."""
        super().__init__(*arguments)
        self.lead(ranks)

    @property
    def shared_rows(self) -> Tensor:
        return self._hidden
