"""The pool of engines: those whose address is gone are used no more, and leave nothing behind."""

import pytest
from prometheus_client import REGISTRY

from services.tokenizer.engines.engine_pool import EnginePool, PoolSettings
from services.tokenizer.engines.placement import Need
from services.tokenizer.text.vocabulary import Vocabulary
from tokenwire.errors import ServiceError
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.types.v1 import types_pb2

ENGINES = "tokenwire_tokenizer_engines"


def engines_in(state: str) -> float | None:
    return REGISTRY.get_sample_value(ENGINES, {"state": state})


async def test_addresses_that_come_and_go_leave_no_engine(
    byte_level_vocabulary: Vocabulary,
) -> None:
    settings = PoolSettings(["dns:///engines:1"], "m", 5, 16, True, wait_seconds=1)
    pool = EnginePool(settings, byte_level_vocabulary, lambda _: None)
    for number in range(3):
        pool._peers.set_addresses({f"127.0.0.{number + 1}:9": "engines", "127.0.0.9:9": "engines"})
        assert engines_in("away") == 2
    pool._peers.set_addresses({})
    assert engines_in("away") == 0
    request = engine_pb2.GenerateRequest(prompts=[types_pb2.TokenIds(ids=[1])])
    with pytest.raises(ServiceError) as refused:
        pool.place(Need(request, ""), ())
    assert refused.value.reason == "NO_ENGINE"
    await pool.close()
