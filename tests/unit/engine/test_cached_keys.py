"""Size of the KV cache by config.json alone, against the engine's own reckoning."""

import pytest
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from services.common.json_values import Json
from services.engine.cached_keys import cached_keys
from services.engine.model.architecture.cache_groups import layer_groups
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.checkpoint.config import Config
from tests.unit.engine.checkpoints.configs import CONFIGS

_LEAST_KNOWN = 90
"""Number of configs whose cache is known, so that the comparison can't become empty"""


def _values(config: PreTrainedConfig) -> dict[str, Json]:
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            model = auto._model_mapping[type(config)]
            assert isinstance(model, type)
            return config.to_dict() | {"architectures": [model.__name__]}
    pytest.fail(f"{type(config).__name__} has no model")


def test_known_caches_have_the_size_that_the_engine_reckons_with() -> None:
    known = 0
    for name, config in CONFIGS.items():
        values = _values(config)
        keys = cached_keys(Config(name, values))
        if keys is None:
            continue
        known += 1
        groups = layer_groups(ModelSpec.from_config(values))
        everywhere = sum(group.token_width for group in groups if not group.window)
        near = [group for group in groups if group.window]
        assert keys.everywhere == everywhere, name
        assert keys.within_window == sum(group.token_width for group in near), name
        assert not near or {group.window for group in near} == {keys.window}, name
    assert known > _LEAST_KNOWN


def test_layers_that_only_the_family_gives_a_window_are_counted() -> None:
    values: dict[str, Json] = {
        "architectures": ["Gemma3ForCausalLM"],
        "vocab_size": 32,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "num_hidden_layers": 12,
        "max_position_embeddings": 64,
        "sliding_window": 10,
        "sliding_window_pattern": 6,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 4,
    }
    keys = cached_keys(Config("config.json", values))
    groups = layer_groups(ModelSpec.from_config(values))
    assert keys is not None
    assert {group.window: group.token_width for group in groups} == {
        0: keys.everywhere,
        10: keys.within_window,
    }
    assert keys.everywhere == 2 * 8


def test_layers_with_a_window_stop_growing() -> None:
    values: dict[str, Json] = {
        "architectures": ["Olmo3ForCausalLM"],
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "sliding_window": 10,
        "layer_types": ["full_attention", "sliding_attention"],
    }
    keys = cached_keys(Config("config.json", values))
    assert keys is not None
    assert keys.numbers(5) == 2 * 16 * 5
    assert keys.numbers(100) == 16 * 100 + 16 * 10
