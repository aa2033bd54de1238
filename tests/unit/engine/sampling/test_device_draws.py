"""Draws on a GPU, launched on tensors without data: an operation that waits for one raises."""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from services.engine.checked_request import (
    DrySettings,
    LogitBias,
    MirostatSettings,
    SamplingSettings,
)
from services.engine.sampling.mirostat import Mirostat
from services.engine.sampling.penalties import Penalties
from services.engine.sampling.pending_tokens import PendingTokens
from services.engine.sampling.row import Row
from services.engine.sampling.sampler import argmax
from services.engine.sampling.warm_up import warm_up

draw_kernels = pytest.importorskip("services.engine.sampling.draw_kernels")
mask_kernel = pytest.importorskip("services.engine.sampling.mask_kernel")

ROWS, VOCABULARY = 8, 5000
DEVICE = torch.device("meta")
PLAIN = SamplingSettings(0.8, 1.0, 0, 0.0, 1)
MASK = b"\x5a" * (VOCABULARY // 8)


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what computes on a device, and the copied bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        self.copied = 0
        self.kernels: set[str] = set()
        """Names of launched Triton kernels"""

    def __torch_dispatch__(
        self, function: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        given = tree_leaves((args, kwargs))
        name, alias = function.name(), function._schema.returns[0].alias_info
        is_view = alias is not None and not alias.is_write
        is_on_device = any(
            isinstance(each, Tensor) and each.device == DEVICE for each in tree_leaves(result)
        )
        is_from_host = is_on_device and any(
            isinstance(each, Tensor) and each.device.type == "cpu" and each.dim() for each in given
        )
        if is_from_host:  # such as an index on the host
            assert name == "aten::_to_copy", f"{name} waits"
            assert kwargs["non_blocking"]
            self.copied += args[0].nbytes
        elif is_on_device and not is_view and not name.startswith("aten::empty"):
            self.count += 1
        return result

    def launch(self, kernel: str) -> None:
        self.count += 1
        self.kernels.add(kernel)


KERNELS = [
    (module, name)
    for module in (draw_kernels, mask_kernel)
    for name, value in vars(module).items()
    if hasattr(value, "arg_names")
]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Count launches. Triton can't launch kernels on tensors without data."""
    mode = Launches()

    class Kernel:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *arguments, **options: mode.launch(self._name)

    for module, name in KERNELS:
        monkeypatch.setattr(module, name, Kernel(name))
    with mode:
        yield mode


def penalised(settings: SamplingSettings) -> Penalties:
    penalties = Penalties(settings, 20)
    penalties.update(np.arange(40, dtype=np.int32))
    return penalties


PENALTIES = replace(
    PLAIN,
    repetition_penalty=1.2,
    frequency_penalty=0.3,
    dry=DrySettings(1.0, 1.5, 1, frozenset()),
)
BIASED = replace(PLAIN, logit_bias=LogitBias(array("q", [3, 4]), array("f", [1.0, -1.0])))
MIROSTAT = MirostatSettings(3.0, 0.1)
KINDS: dict[str, Callable[[int], Row]] = {
    "greedy": lambda i: Row(replace(PLAIN, temperature=0.0), 0, i),
    "plain": lambda i: Row(PLAIN, 0, i),
    "top-p": lambda i: Row(replace(PLAIN, top_p=0.9), 0, i),
    "top-k": lambda i: Row(replace(PLAIN, top_k=5), 0, i),
    "masked": lambda i: Row(PLAIN, 0, i, mask=MASK),
    "biased": lambda i: Row(BIASED, 0, i),
    "penalised": lambda i: Row(PENALTIES, 0, i, penalties=penalised(PENALTIES)),
    "forbidden": lambda i: Row(PLAIN, 0, i, forbidden=(1, 2)),
    "banned": lambda i: Row(PLAIN, 0, i, banned=(1, 2)),
    "banned and masked": lambda i: Row(PLAIN, 0, i, banned=(1, 2), mask=MASK),
    "mirostat": lambda i: Row(replace(PLAIN, mirostat=MIROSTAT), 0, i, mirostat=Mirostat(MIROSTAT)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_mixed", [False, True])
def test_draws_and_scores_are_launched_without_waiting(
    launches: Launches, kind: str, is_mixed: bool
) -> None:
    rows = [KINDS[kind if i % 2 or not is_mixed else "top-p"](i) for i in range(ROWS)]
    logits = torch.empty(ROWS, VOCABULARY, device=DEVICE)
    pending = PendingTokens(logits, rows, [None, 3] * (ROWS // 2))
    assert pending.on_device.shape == (ROWS,)


@pytest.mark.usefixtures("launches")
def test_waiting_for_a_device_is_found() -> None:
    logits = torch.empty(ROWS, VOCABULARY, device=DEVICE)
    with pytest.raises(NotImplementedError):
        argmax(logits)
    with pytest.raises(AssertionError, match="waits"):
        logits[torch.tensor([1, 3])]


@pytest.mark.parametrize(
    ("kind", "most"), [("greedy", 2), ("plain", 4), ("top-p", 9), ("top-k", 9), ("masked", 6)]
)
def test_draw_takes_few_launches(launches: Launches, kind: str, most: int) -> None:
    """Each takes the host some microseconds while the GPU may be idle."""
    rows = None if kind == "greedy" else [KINDS[kind](i) for i in range(ROWS)]
    PendingTokens(torch.empty(ROWS, VOCABULARY, device=DEVICE), rows)
    assert launches.count <= most


def test_masks_are_copied_as_bits(launches: Launches) -> None:
    masked = replace(PLAIN, temperature=0.0)
    rows = [Row(masked, 0, i, mask=MASK) for i in range(ROWS)]
    PendingTokens(torch.empty(ROWS, VOCABULARY, device=DEVICE), rows)
    assert launches.copied == ROWS * 4 * (1 + -(-VOCABULARY // 32))


def test_first_draws_use_every_kernel(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that compiles under load stops all streams for seconds."""
    monkeypatch.setattr(PendingTokens, "wait", lambda tokens: None)
    warm_up(VOCABULARY, DEVICE)
    assert launches.kernels == {name for _, name in KERNELS}
