"""Decodes whose contexts begin with the same blocks draw the same tokens, and read them once."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.batch import shared_prefixes
from services.engine.engine import Engine
from services.engine.execution import batch_builder, loaded_model
from services.engine.messages import RequestDone, Token
from services.engine.model import loader
from services.engine.settings import EngineSettings
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.driver import random_tokens
from tests.unit.engine.checkpoints.files import make_checkpoint

paged = pytest.importorskip("services.engine.model.attention.paged_backend")

pytestmark = pytest.mark.skipif(
    "TRITON_INTERPRET" not in os.environ, reason="a GPU runs the kernels compiled"
)

PREFIX = 70
"""Tokens that the prompts share: a block of 64, and a part of one"""
TOKENS = 3


def test_tokens_are_those_of_prompts_that_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged, "_DTYPES", (torch.float32,))
    monkeypatch.setattr(loader, "native", None)
    monkeypatch.setattr(loader, "choose_backend", lambda *model, **_: paged.PagedAttention(*model))
    monkeypatch.setattr(loaded_model, "populate_behind", lambda _: None)  # pages lie as on a GPU
    monkeypatch.setattr(batch_builder, "LEAST_ROWS", 3)
    for name, value in (("LEAST_ROWS", 3), ("LEAST_TOKENS", 64), ("LEAST_SHARERS", 2)):
        monkeypatch.setattr(shared_prefixes, name, value)
    shared: list[list[int]] = []
    attend_shared = paged.attend_shared

    def spy(*operands: Any) -> None:
        shared.append(operands[2].tokens.tolist())
        attend_shared(*operands)

    monkeypatch.setattr(paged, "attend_shared", spy)
    make_checkpoint(tmp_path, CONFIGS["llama"])
    prefix = random_tokens(PREFIX, 1).tolist()
    prompts = [prefix + random_tokens(3 + 5 * i, 2 + i).tolist() for i in range(3)]
    settings = EngineSettings(dtype="float32", device="cpu", kv_memory="64MiB")
    with Engine(tmp_path, settings) as engine:
        alone = [
            engine.generate(prompt, max_tokens=TOKENS, temperature=0, ignore_eos=True).token_ids
            for prompt in prompts
        ]
        assert not shared
        assert together(engine, prompts) == alone
        assert set(map(tuple, shared)) == {(64, 64, 64)}
        shared.clear()
        other = random_tokens(70, 9).tolist()
        mixed = together(engine, [prompts[0], other, *prompts[1:]])
        assert [64, 0, 64, 64] in shared, "one context begins differently"
        assert [mixed[0], *mixed[2:]] == alone
        shared.clear()
        together(engine, [prompts[0], other, random_tokens(70, 8).tolist()])
        assert not shared, "all contexts begin differently"


def together(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Return the tokens of prompts that decode in the same steps."""
    handles = [
        engine.submit(prompt, max_tokens=TOKENS, temperature=0, ignore_eos=True)
        for prompt in prompts
    ]
    tokens: dict[int, list[int]] = {handle: [] for handle in handles}
    unfinished = set(handles)
    while unfinished:
        for output in engine.step():
            if isinstance(output, Token):
                tokens[output.handle].append(output.id)
            elif isinstance(output, RequestDone):
                unfinished.remove(output.handle)
    return [tokens[handle] for handle in handles]
