"""Choice among the releases of FlashAttention that are installed."""

from functools import partial

import pytest
import torch
from torch.nn import attention
from torch.nn.attention import _registry

from services.engine.model.attention import flash

CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("capability", "installed", "broken", "unfit", "tried"),
    [
        ((9, 0), {"flash_attn_interface", "flash_attn.cute"}, set(), set(), ["FA3"]),
        ((9, 0), {"flash_attn_interface", "flash_attn.cute"}, {"FA3"}, set(), ["FA3", "FA4"]),
        ((9, 0), {"flash_attn_interface", "flash_attn.cute"}, set(), {"FA3"}, ["FA3", "FA4"]),
        ((9, 0), {"flash_attn_interface"}, set(), {"FA3"}, ["FA3"]),
        ((10, 0), {"flash_attn_interface", "flash_attn.cute"}, set(), set(), ["FA4"]),
        ((10, 0), {"flash_attn_interface"}, set(), set(), []),
        ((8, 0), {"flash_attn_interface", "flash_attn.cute"}, set(), set(), []),
        ((9, 0), set(), set(), set(), []),
    ],
)
def test_newest_release_that_computes_the_layers_is_used(
    capability: tuple[int, int],
    installed: set[str],
    broken: set[str],
    unfit: set[str],
    tried: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An extension that was built for another torch must not keep the engine from starting.

    Nor must one whose kernels lack a shape of the model; torch's own kernel then stays in use.
    """
    seen: list[str] = []

    class Handle:
        def remove(self) -> None:
            pass

    def register(name: str) -> Handle:
        seen.append(name)
        if name in broken:
            raise OSError("undefined symbol")
        return Handle()

    def check() -> None:
        if attention.current_flash_attention_impl() in unfit:
            raise RuntimeError("head dimension 80 is not compiled")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(flash, "_is_installed", installed.__contains__)
    releases = {name: partial(register, name) for name in ("FA3", "FA4")}
    monkeypatch.setattr(_registry, "_FLASH_ATTENTION_IMPLS", releases)
    monkeypatch.setattr(_registry, "_FLASH_ATTENTION_ACTIVE", None)
    flash.use_newest_flash(CUDA, check)
    assert seen == tried
    used = [name for name in tried if name not in broken | unfit]
    assert attention.current_flash_attention_impl() == (used[0] if used else None)


def test_package_without_the_release_is_not_installed() -> None:
    assert flash._is_installed("torch.nn")
    assert not flash._is_installed("torch.no_such_part")
    assert not flash._is_installed("no_such_package.cute")
