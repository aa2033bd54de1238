"""Types of cached keys and values: their choice, refusals, and whole models over them."""

from functools import partial
from pathlib import Path

import pytest
import torch

from services.common.settings import StartupError
from services.engine.execution.loaded_model import load
from services.engine.kernels.library import InstructionSet
from services.engine.model.attention import choose_backend
from services.engine.model.attention.kv_dtype import resolve_kv_dtype
from services.engine.model.loader import load_model, load_spec
from services.engine.model.model import Model
from services.engine.settings import EngineSettings
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.driver import Driver, random_tokens
from tests.unit.engine.checkpoints.files import make_checkpoint
from tests.unit.engine.machines import restrict_kernels

CPU, GPU = torch.device("cpu"), torch.device("cuda")
TOKENS = 90
FAMILIES = ("llama", "gemma2")
"""Plain attention, and with windows and soft caps"""
ERRORS = {"float16": 5e-3, "bfloat16": 5e-2, "int8": 2e-1}
"""Largest error of a logit, as a share of the largest logit, over a cache of this type"""


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(path, CONFIGS[request.param])
    return path


@pytest.mark.parametrize(
    ("instructions", "dtype", "chosen"),
    [
        (InstructionSet.BASELINE, torch.float32, torch.float32),
        (InstructionSet.AVX2, torch.float32, torch.float16),
        (InstructionSet.AVX512, torch.float32, torch.float16),
        (InstructionSet.AVX2, torch.bfloat16, torch.bfloat16),
    ],
    ids=str,
)
def test_cache_takes_16_bits_where_the_cpu_converts_them(
    checkpoint: Path, instructions: InstructionSet, dtype: torch.dtype, chosen: torch.dtype
) -> None:
    """float32 would halve the context that fits, and the speed of long ones."""
    with restrict_kernels(instructions):
        assert resolve_kv_dtype("auto", load_spec(checkpoint), dtype, CPU) == chosen


@pytest.mark.parametrize(("dtype", "chosen"), [("float32", torch.float32), ("auto", torch.float16)])
def test_stated_dtype_is_that_of_the_cache_too(
    checkpoint: Path, dtype: str, chosen: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who asks for float32 wants no rounding anywhere."""
    monkeypatch.setattr(
        "services.engine.execution.loaded_model.resolve_dtype", lambda *_: torch.float32
    )
    settings = EngineSettings(model=checkpoint, dtype=dtype, kv_memory="1MiB", max_running=2)
    with restrict_kernels(InstructionSet.AVX2):
        assert load(settings).decoder.kv_dtype == chosen


def test_narrow_cache_holds_more_tokens_of_the_same_memory(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, CONFIGS["llama"])
    blocks = {}
    for kv_dtype in ("float32", "float16", "int8"):
        settings = EngineSettings(
            model=tmp_path, dtype="float32", kv_dtype=kv_dtype, kv_memory="192KiB", max_running=256
        )
        with restrict_kernels(InstructionSet.AVX2):
            blocks[kv_dtype] = load(settings).blocks[0]
    assert blocks["float16"] == 2 * blocks["float32"]
    assert blocks["int8"] > 1.5 * blocks["float16"]  # a scale takes 4 bytes beside the 16 of a head


@pytest.mark.parametrize("kv_dtype", ERRORS)
@pytest.mark.parametrize("instructions", [InstructionSet.AVX2, InstructionSet.AVX512], ids=str)
def test_model_over_a_narrow_cache_is_near_the_exact_one(
    checkpoint: Path, kv_dtype: str, instructions: InstructionSet
) -> None:
    """Prompts whole, in chunks and token by token see the same rounded keys: they agree.

    But a key near the middle of two numbers may be rounded to either.
    """
    tokens = random_tokens(TOKENS, 3)
    with restrict_kernels(instructions):
        exact = run(load_model(checkpoint, torch.float32), tokens, [TOKENS])
        decoder = load_model(checkpoint, torch.float32, kv_dtype=kv_dtype)
        whole = run(decoder, tokens, [TOKENS])
        parted = run(decoder, tokens, [33, 1, 20, *[1] * (TOKENS - 54)])
    error = (whole - exact).abs().max()
    assert 0 < error < ERRORS[kv_dtype] * exact.abs().max()
    assert (parted - whole).abs().max() < 0.3 * error


def run(decoder: Model, tokens: torch.Tensor, chunks: list[int]) -> torch.Tensor:
    driver = Driver(decoder, [tokens])
    for chunk in chunks:
        driver.step([(0, chunk)])
    return driver.logits[0]


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("deepseek v3", "DeepseekV3ForCausalLM keeps latents instead of keys and values"),
        ("mamba2", "Mamba2ForCausalLM keeps states, and neither keys nor values"),
        ("inkling", "InklingForCausalLM keeps keys and values in rows for torch"),
    ],
)
def test_family_without_keys_refuses_their_type(tmp_path: Path, family: str, reason: str) -> None:
    make_checkpoint(tmp_path, CONFIGS[family])
    with pytest.raises(StartupError, match=f"--kv-dtype int8: {reason}.*Start without it."):
        load_model(tmp_path, torch.float32, kv_dtype="int8")
    assert load_model(tmp_path, torch.float32, kv_dtype="auto").kv_dtype == torch.float32


def test_fp8_is_for_gpus_that_multiply_16_bits(checkpoint: Path) -> None:
    spec = load_spec(checkpoint)
    for dtype in (torch.bfloat16, torch.float16):
        assert resolve_kv_dtype("fp8", spec, dtype, GPU) == torch.float8_e4m3fn
    with pytest.raises(StartupError, match="--kv-dtype fp8: attention over FP8 is computed in"):
        resolve_kv_dtype("fp8", spec, torch.float32, GPU)
    with pytest.raises(StartupError, match="--kv-dtype fp8: a CPU keeps keys and values in"):
        resolve_kv_dtype("fp8", spec, torch.bfloat16, CPU)


def test_gpu_that_can_not_read_fp8_refuses_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that kept keys in 16 bits instead would hold half the contexts it promised."""
    pytest.importorskip("triton")
    spec = load_spec(checkpoint)
    wanted = partial(choose_backend, spec, torch.bfloat16, GPU, kv_dtype="fp8")
    for capability, chosen in (((8, 9), torch.float8_e4m3fn), ((12, 0), torch.float8_e4m3fn)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, has=capability: has)
        assert wanted().kv_dtype == chosen
    with pytest.raises(StartupError, match="xformers reads no FP8"):
        wanted(with_xformers=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    with pytest.raises(StartupError, match=r"compute capability 8\.9 .* has 8\.6\."):
        wanted()


def test_machines_that_do_not_convert_refuse_another_type(checkpoint: Path) -> None:
    spec = load_spec(checkpoint)
    with pytest.raises(StartupError, match="--kv-dtype int8: a GPU keeps keys and values in"):
        resolve_kv_dtype("int8", spec, torch.bfloat16, GPU)
    with pytest.raises(StartupError, match="--kv-dtype int8: only the compiled CPU kernels"):
        resolve_kv_dtype("int8", spec, torch.float16, CPU)
