"""Decodes whose contexts begin with the same blocks draw the same tokens, and read them once."""

import os
from pathlib import Path

import pytest
import torch

from services.engine.engine import Engine
from services.engine.execution import loaded_model, model_runner
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
    monkeypatch.setattr(model_runner, "_LEAST_SHARERS", 3)
    monkeypatch.setattr(model_runner, "_LEAST_SHARED", 64)
    shared: list[int] = []
    attend_shared = paged.attend_shared

    def spy(*operands: torch.Tensor) -> None:
        shared.append(int(operands[2]))
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
        assert set(shared) == {64}
        shared.clear()
        together(engine, [*prompts[:2], random_tokens(70, 9).tolist()])
        assert not shared, "one of the contexts begins differently"


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
