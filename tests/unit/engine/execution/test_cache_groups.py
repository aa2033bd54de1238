"""Groups of caches in a running engine: answers stay, memory of windows and states is bounded."""

import itertools
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from services.common.json_values import Json
from services.engine.execution.cache_need import CacheNeed, GroupNeed
from services.engine.execution.draft_model import DraftModel
from services.engine.execution.loaded_model import load
from services.engine.execution.model_runner import ModelRunner
from services.engine.loop.request_table import LoopLimits
from services.engine.loop.step_loop import StepLoop
from services.engine.messages import RequestDone, Token
from services.engine.model.architecture.cache_groups import layer_groups
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.decoder import Decoder
from services.engine.model.loader import load_model
from services.engine.model.model import Model
from services.engine.scheduling.cache_limits import CacheLimits, GroupLimits
from services.engine.scheduling.cache_pools import CachePools
from services.engine.scheduling.scheduler import Scheduler
from services.engine.scheduling.step_plan import SchedulerLimits
from services.engine.settings import EngineSettings
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.driver import Driver, random_tokens
from tests.unit.engine.checkpoints.files import make_checkpoint
from tests.unit.engine.tiny import make_request

BLOCK = 32
CHUNK = 40
FAMILIES = (
    *(
        "cohere2 moe",
        "deepseek v3",
        "deepseek v4",
        "glm moe dsa",
        "gemma3",
        "gpt-oss",
        "inkling",
        "bailing hybrid",
        "kimi linear",
        "laguna",
        "minimax m3",
        "mistral, window",
        "olmo hybrid",
    ),
    *("qwen3 next", "qwen3.5", "lfm2 moe", "lfm3", "granite hybrid"),
    *(
        "falcon h1",
        "nemotron h",
        "mamba2",
        "mamba",
        "jamba",
        "recurrent gemma",
        "minimax",
        "zamba",
        "zamba2",
    ),
)


def limits_of(decoder: Model, blocks: int, slots: int) -> CacheLimits:
    """Return the limits of caches with so many blocks in each group."""
    groups = [GroupLimits(blocks, group.window) for group in layer_groups(decoder.spec)]
    return CacheLimits(BLOCK, groups, slots if decoder.state_bytes else 0, 64, chunk_tokens=CHUNK)


def loop_of(
    decoder: Model, limits: CacheLimits, *, speculate: bool = False, draft: Model | None = None
) -> StepLoop:
    """Return a loop. draft: model that makes draft tokens, which take no time."""
    model = None
    if draft is not None:
        blocks = [limits.groups[0].num_blocks] * len(layer_groups(draft.spec))
        pages = draft.allocate_cache(blocks, BLOCK)
        model = DraftModel(draft, pages, decoder.spec.vocab_size, 128, lambda: 0.0)
    clock = itertools.count()
    cache = decoder.allocate_cache(
        [group.num_blocks for group in limits.groups], BLOCK, limits.state_slots
    )
    caches = CachePools(limits)
    drafts = None if model is None else model.limits
    scheduler = Scheduler(SchedulerLimits(4, CHUNK, 2.0, 32, speculate, draft=drafts), caches)
    return StepLoop(
        scheduler,
        ModelRunner(decoder, cache),
        LoopLimits(frozenset(), 100),
        lambda: float(next(clock)),
        draft=model,
    )


def tokens_of(loop: StepLoop, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Return greedy answers of requests that run together."""
    requests = [
        make_request(handle, [prompt], max_tokens=count, context=4096)
        for handle, prompt in enumerate(prompts)
    ]
    answers: list[list[int]] = [[] for _ in prompts]
    loop.apply(requests)
    while not loop.is_idle:
        for output in loop.step(lambda: ()).outputs:
            if isinstance(output, Token):
                answers[output.handle].append(output.id)
        loop.check()
    return answers


@torch.no_grad()
def is_greedy(model: torch.nn.Module, prompt: list[int], answer: list[int]) -> bool:
    """Return whether transformers would answer so, one best token after the other."""
    best: Tensor = model(torch.tensor([prompt + answer])).logits[0].argmax(dim=1)
    return torch.equal(best[len(prompt) - 1 : -1], torch.tensor(answer))


COMMON = random_tokens(70, 1).tolist()
PROMPTS = [
    *(COMMON + random_tokens(20 + 30 * i, 2 + i).tolist() for i in range(3)),
    random_tokens(8, 9).tolist() * 6,  # drafts repeat it
]


class Family:
    """A decoder, and the answers to `PROMPTS` that transformers has confirmed."""

    def __init__(self, path: Path, config: PreTrainedConfig) -> None:
        self._reference = make_checkpoint(path, config)
        self.decoder = load_model(path, torch.float32)
        self._confirmed: list[list[list[int]]] = []

    def answers(self, answers: list[list[int]]) -> bool:
        """Return whether transformers would answer so."""
        if answers not in self._confirmed:
            if not all(map(partial(is_greedy, self._reference), PROMPTS, answers)):
                return False
            self._confirmed.append(answers)
        return True


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(tmp_path_factory.mktemp("family"), CONFIGS[request.param])


@pytest.mark.parametrize("drafter", ["none", "n-grams", "model"])
def test_answers_equal_transformers_however_scarce_the_caches(
    family: Family, drafter: str, tmp_path: Path
) -> None:
    """Prompts come in chunks, share beginnings, preempt each other, and come again."""
    decoder = family.decoder
    draft = draft_of(decoder, tmp_path / "draft") if drafter == "model" else None
    loop = loop_of(decoder, limits_of(decoder, 10, 7), speculate=drafter == "n-grams", draft=draft)
    first, second = (tokens_of(loop, PROMPTS, 8) for _ in range(2))
    assert first == second
    assert [len(answer) for answer in first] == [8] * len(PROMPTS)
    assert family.answers(first)
    if draft is decoder:
        [total] = loop.take_output().load.drafts
        assert total.accepted > 0


def draft_of(decoder: Model, directory: Path) -> Model | None:
    """Return the model itself if it can draft, else a Llama; None if it takes no draft model."""
    if layer_groups(decoder.spec)[0].window:
        return None
    if not decoder.state_bytes:
        return decoder
    make_checkpoint(directory, CONFIGS["llama"])
    return load_model(directory, torch.float32)


@pytest.mark.parametrize("family", ["qwen3.5", "gemma3", "mamba2"])
def test_turn_of_a_chat_continues_behind_the_answer_before_it(family: str, tmp_path: Path) -> None:
    """Otherwise each turn of a recurrent model would compute the whole chat again."""
    make_checkpoint(tmp_path, CONFIGS[family])
    decoder = load_model(tmp_path, torch.float32)
    loop = loop_of(decoder, limits_of(decoder, 40, 20))
    chat: list[int] = []
    for turn in range(4):
        before = max(len(chat) - 1, 0)  # the last token was drawn and never computed
        chat += random_tokens(45, turn).tolist()
        loop.apply([make_request(turn, [chat], max_tokens=25, context=4096)])
        cached = None
        while not loop.is_idle:
            for output in loop.step(lambda: ()).outputs:
                if isinstance(output, Token):
                    chat.append(output.id)
                elif isinstance(output, RequestDone):
                    cached = output.cached_tokens
        assert cached == before // BLOCK * BLOCK


@pytest.mark.parametrize(
    "family",
    [
        "falcon h1",
        "jamba",
        "kimi linear",
        "mamba2",
        "minimax",
        "olmo hybrid",
        "qwen3.5",
        "zamba",
        "zamba2",
    ],
)
def test_bfloat16_states_take_half_and_continue_prompts(family: str, tmp_path: Path) -> None:
    """--state-dtype bfloat16: prompts continue from rounded snapshots as they began."""
    make_checkpoint(tmp_path, CONFIGS[family])
    settings = EngineSettings(
        model=tmp_path, dtype="float32", state_dtype="bfloat16", max_step_tokens=CHUNK
    )
    model = load(settings)
    exact, decoder = load_model(tmp_path, torch.float32), model.decoder
    states = list(model.cache.states.values())
    assert all(layer[-1].dtype == torch.bfloat16 for layer in states if layer)
    recurrent = [each for layer in states for each in layer if each.dtype == torch.bfloat16]
    assert decoder.state_bytes == sum(each[0].nbytes for layer in states for each in layer)
    halves = sum(each[0].nbytes for each in recurrent)
    assert exact.state_bytes == decoder.state_bytes + halves
    assert isinstance(decoder, Decoder)
    loop = loop_of(decoder, limits_of(decoder, 40, 20))
    prompt = random_tokens(100, 1)
    first = tokens_of(loop, [prompt.tolist()], 8)
    assert tokens_of(loop, [prompt.tolist()], 8) == first
    logits = []
    for each in (exact, decoder):
        driver = Driver(each, [prompt])
        for count in (60, *[1] * 40):
            driver.step([(0, count)])
        logits.append(driver.logits[0])
    difference = (logits[0] - logits[1]).abs().max()
    assert 0 < difference < 0.02 * logits[0].abs().max()


SHAPES: dict[str, tuple[dict[str, Json], tuple[float, float]]] = {
    "gpt-oss 20B": (
        {
            "architectures": ["GptOssForCausalLM"],
            "vocab_size": 201_088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "max_position_embeddings": 131_072,
        },
        (1.50, 0.80),
    ),
    "Gemma 3 27B": (
        {
            "architectures": ["Gemma3ForCausalLM"],
            "hidden_size": 5376,
            "intermediate_size": 21_504,
            "num_hidden_layers": 62,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "sliding_window": 1024,
        },
        (15.50, 3.73),
    ),
    "DeepSeek-V2-Lite": (
        {
            "architectures": ["DeepseekV2ForCausalLM"],
            "vocab_size": 102_400,
            "hidden_size": 2048,
            "intermediate_size": 10_944,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "num_experts_per_tok": 6,
            "max_position_embeddings": 163_840,
        },
        (0.95, 0.95),
    ),
}
"""Published configurations, with the GiB of 32,768 tokens without and with bounded windows"""


@pytest.mark.parametrize("model", SHAPES)
def test_long_sequence_takes_the_memory_that_the_documentation_states(model: str) -> None:
    config, (whole, bounded) = SHAPES[model]
    groups = layer_groups(ModelSpec.from_config(config))
    needs = [GroupNeed(2 * each.token_width * BLOCK, each.window) for each in groups]
    need = CacheNeed(32_768, BLOCK, needs, 64, 2048)
    held = sum(need.blocks(32_768, i) * each.block_bytes for i, each in enumerate(needs))
    assert round(held / 2**30, 2) == bounded
    without = sum(32_768 // BLOCK * each.block_bytes for each in needs)
    assert round(without / 2**30, 2) == whole


def test_windows_bound_the_memory_of_their_group() -> None:
    """With four layers that see 1,024 tokens and one that sees all, 64 long sequences fit."""
    block = 1 << 20
    need = CacheNeed(131_072, 32, [GroupNeed(block), GroupNeed(4 * block, 1024)], 64, 2048)
    blocks = need.affordable(64 << 30)
    full, windowed = need.divide(blocks)
    assert full * block + windowed * 4 * block <= 64 << 30 < need.bytes(blocks + 1)
    assert windowed == 64 * 33 + 2048 // 32
    assert full > 4 * windowed
    assert need.longest(blocks) == 131_072
    alike = CacheNeed(131_072, 32, [GroupNeed(5 * block)], 64, 2048)
    assert full > 4 * alike.affordable(64 << 30)


FLASH: dict[str, Json] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "vocab_size": 129_280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "max_position_embeddings": 1 << 20,
    "compress_ratios": [0, 0, *(4, 128) * 20, 4, 0],
}
"""Published configuration of DeepSeek V4 Flash"""


@pytest.mark.parametrize(("gib", "tokens"), [(1, 19_000), (4, 235_000), (8, 524_000)])
def test_most_memory_of_compressed_attention_goes_to_entries(gib: int, tokens: int) -> None:
    """A step's tokens take more blocks than the windows do, but all sequences share them."""
    groups = layer_groups(ModelSpec.from_config(FLASH))
    needs = [GroupNeed(2 * each.block_width(BLOCK), each.window) for each in groups]
    need = CacheNeed(1 << 20, BLOCK, needs, 256, 4096)
    blocks = need.affordable(gib << 30)
    assert need.longest(blocks) >= tokens
    assert all(count >= need.blocks(tokens, i) for i, count in enumerate(need.divide(blocks)))


def test_small_memory_holds_no_more_blocks_of_windows_than_of_texts() -> None:
    need = CacheNeed(131_072, 32, [GroupNeed(1 << 20), GroupNeed(1 << 20, 4096)], 16, 2048)
    assert need.divide(need.affordable(1 << 30)) == (512, 512)


def test_longest_context_fits_into_every_group() -> None:
    need = CacheNeed(131_072, 32, [GroupNeed(1 << 20), GroupNeed(1 << 20, 4096)], 64, 2048)
    for memory in (1 << 28, 1 << 30, 8 << 30):
        blocks = need.affordable(memory)
        longest = need.longest(blocks)
        groups = [GroupLimits(need.divide(blocks)[i], need.groups[i].window) for i in range(2)]
        caches = CachePools(CacheLimits(32, groups, chunk_tokens=2048))
        assert caches.fits(longest)


def test_model_without_pages_has_any_context_for_the_memory_of_its_states() -> None:
    """Mamba 2 keeps nothing of single tokens, so a small machine may serve its whole context."""
    state = 16 << 20
    need = CacheNeed(1 << 20, 32, [GroupNeed(0)], 8, 2048, state_bytes=state)
    blocks = need.affordable(10 * state)
    assert need.longest(blocks) == 1 << 20
    assert need.state_slots(blocks) * state == need.bytes(blocks) == 9 * state
    slots, [count] = need.state_slots(blocks), need.divide(blocks)
    caches = CachePools(CacheLimits(32, [GroupLimits(count, 0)], slots, need.snapshot_interval))
    assert caches.fits(1 << 20)
    assert need.state_slots(need.most_blocks) == 3 * 8  # two of each sequence, and a snapshot


def test_snapshots_take_as_much_memory_as_the_pages_of_their_interval() -> None:
    need = CacheNeed(131_072, 64, [GroupNeed(64 << 14)], 8, 2048, state_bytes=16 << 20)
    assert need.snapshot_interval == 1024
    blocks = need.affordable(4 << 30)
    assert need.state_slots(blocks) == 2 * 8 + blocks * 64 // 1024
    assert need.bytes(blocks) <= 4 << 30
