"""State of an output before its first token, for what its grammar can't express."""

from typing import TypeAlias

from services.grammar import specification
from services.grammar.matching.embedded_state import EmbeddedState
from services.grammar.matching.json_state import JsonState
from services.grammar.matching.outline import Outline
from services.grammar.matching.separators import SeparatorState
from services.grammar.matching.token_index import TokenIndex
from services.grammar.matching.uniqueness import UniquenessState
from tokenwire.pb.types.v1.types_pb2 import GrammarSpec

__all__ = ["OutputState", "initial_state"]

OutputState: TypeAlias = JsonState | EmbeddedState
"""The state of JSON, or of a text that contains JSON"""


def initial_state(spec: GrammarSpec, index: TokenIndex) -> OutputState | None:
    """Return the state before the first token; None if the grammar alone is enough."""
    outline = specification.outline(spec, index.outlines.value)
    if outline is not None:
        return EmbeddedState(index, Outline.compile(index.outlines, outline))
    positions = specification.positions(spec)
    uniqueness = None if positions is None else UniquenessState(positions, index)
    separators = SeparatorState(index) if specification.has_default_spaces(spec) else None
    return JsonState(uniqueness, separators) if uniqueness or separators else None
