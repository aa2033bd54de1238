"""The client of the compile process."""

from pathlib import Path

import grpc
import pytest

from services.grammar.compiling.compiler import Compiler
from tokenwire.errors import ServiceError
from tokenwire.pb.types.v1.types_pb2 import GrammarSpec


async def test_grammar_is_unavailable_while_the_process_does_not_start(tmp_path: Path) -> None:
    """An engine waits for a compiler that was lost, and fails requests on other errors."""
    compiler = Compiler(tmp_path / "removed checkpoint", 1.0, 1)
    with pytest.raises(ServiceError) as caught:
        await compiler.try_out(GrammarSpec(regex="a"))
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    await compiler.stop()
