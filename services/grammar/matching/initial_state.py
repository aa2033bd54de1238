"""Initial state of an output, for the rules that its grammar can't express."""

from typing import TypeAlias

from services.grammar import specification
from services.grammar.matching.embedded_state import EmbeddedState
from services.grammar.matching.json_state import JsonState
from services.grammar.matching.outline import Outline
from services.grammar.matching.separators import SeparatorState
from services.grammar.matching.token_index import TokenIndex
from services.grammar.matching.uniqueness import UniquenessState
from services.grammar.schemas.json_positions import JsonPositions
from tokenwire.pb.types.v1.types_pb2 import GrammarSpec

__all__ = ["OutputState", "initial_state"]

OutputState: TypeAlias = JsonState | EmbeddedState
"""The state of JSON, or of a text that contains JSON"""


def initial_state(spec: GrammarSpec, index: TokenIndex) -> OutputState | None:
    """Return the state before the first token; None if the grammar alone is enough."""
    separators = SeparatorState(index) if specification.has_default_spaces(spec) else None

    def state(positions: JsonPositions | None) -> JsonState:
        uniqueness = None if positions is None else UniquenessState(positions, index)
        return JsonState(index, uniqueness, separators)

    outline = specification.outline(spec, *index.outlines.marks)
    if outline is None:
        whole = state(specification.positions(spec))
        return whole if whole.uniqueness or whole.separators else None
    numbered = [state(positions) for positions in specification.positions_of_values(spec)]
    if not separators and not any(each.uniqueness for each in numbered):
        return None
    compiled = Outline.compile(index.outlines, outline)
    return EmbeddedState(index, state(None), numbered, compiled)
