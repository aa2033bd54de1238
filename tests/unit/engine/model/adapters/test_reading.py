"""Reading of adapters beside the steps."""

import threading
from pathlib import Path

from services.engine.model.adapters.adapters import ConvertedAdapter
from services.engine.model.adapters.reading import AdapterReading


def test_read_does_not_block_its_caller() -> None:
    """Streams would pause while an adapter is read."""
    is_open, made = threading.Event(), ConvertedAdapter([], 0)

    def read(_: Path) -> ConvertedAdapter:
        assert is_open.wait(60)
        return made

    reading = AdapterReading(read)
    reading.start(1, Path("a"))
    assert reading
    assert reading.ready() == []
    is_open.set()
    assert reading.take(1) == (made, "")
    assert not reading
