"""Names of a model's tensors in its files, and their conversion, by transformers' own mapping."""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from services.engine.model.checkpoint.config import CheckpointError

__all__ = ["Conversion", "StoredNames"]


@dataclass(slots=True)
class Conversion:
    """Tensors of files that become tensors of a model in another shape."""

    converter: WeightConverter
    target: str
    """Name of the first tensor of the model that the conversion makes"""
    sources: list[tuple[str, str]] = field(default_factory=list)
    """Each source's name in the files and its pattern, in order"""

    @property
    def targets(self) -> Sequence[str]:
        """Endings of the names of all tensors that such a conversion makes."""
        return self.converter.target_patterns

    def convert(self, tensors: Iterable[Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
        """Return the model's tensors by name, made of those of `sources`."""
        converter = deepcopy(self.converter)
        for (name, pattern), tensor in zip(self.sources, tensors, strict=True):
            converter.collected_tensors[pattern].append(tensor)  # type: ignore[arg-type]
            converter.layer_targets[self.target].add(name)
        made = converter.convert(self.target, model=model, config=model.config)
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}


class StoredNames:
    """Names in the files of a model's tensors."""

    def __init__(self, model: PreTrainedModel, names: Iterable[str], held: Iterable[str]) -> None:
        """names: names of the model's tensors; held: names in the files."""
        mapping = get_model_conversion_mapping(model)
        renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        converters = [each for each in mapping if isinstance(each, WeightConverter)]
        of_pattern = {
            pattern: converter for converter in converters for pattern in converter.source_patterns
        }
        known = dict.fromkeys(names, True)
        prefix = model.base_model_prefix
        self.direct: dict[str, str] = {}
        """Name in the files of each tensor that they hold unconverted"""
        self.conversions: dict[str, Conversion] = {}
        """Conversions by their first tensor"""
        self.unknown: list[str] = []
        """Names in the files that have no place in the model"""
        for name in sorted(held, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, prefix, known)
            if target not in known and name in known:
                target, pattern = name, None
            if target not in known:
                self.unknown.append(name)
            elif pattern is None:
                self.direct[target] = name
            else:
                conversion = self.conversions.setdefault(
                    target, Conversion(of_pattern[pattern], target)
                )
                conversion.sources.append((name, pattern))

    def making(self, name: str) -> Conversion:
        """Return the conversion that makes a tensor of the model.

        Raises CheckpointError if the files lack its sources.
        """
        if name in self.conversions:
            return self.conversions[name]
        for target, conversion in self.conversions.items():
            first, *others = conversion.targets
            if any(target.replace(first, other) == name for other in others):
                return conversion
        raise CheckpointError(f"No file holds the tensors that {name} is made of.")
