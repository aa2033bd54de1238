"""Counts of drafts, by source."""

from services.engine.scheduling.speculation import DraftKind
from tokenwire.pb.types.v1.types_pb2 import DraftSource


def test_sources_of_drafts_are_part_of_the_contract() -> None:
    """Else the usage of a request with such drafts could not be sent."""
    for kind in DraftKind:
        assert DraftSource.Value(f"DRAFT_SOURCE_{kind.value.upper()}") > 0
