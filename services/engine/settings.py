"""Settings of the engine, from flags and environment variables."""

import re
from dataclasses import dataclass

from services.common.peers.targets import parse_targets
from services.common.settings import (
    INSTANT,
    LAST_PORT,
    CheckpointSettings,
    PeerSettings,
    ReportSettings,
    StartupError,
    StreamSettings,
    setting,
)
from tokenwire.channel_options import LOST_SECONDS

__all__ = ["EngineSettings", "parse_bytes", "parse_share", "parse_tokens"]

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, kw_only=True)
class EngineSettings(StreamSettings, PeerSettings, ReportSettings, CheckpointSettings):
    """The engine: token ids in, token ids out."""

    port: int = setting(50052, "Port of the gRPC server; 0 = any free one.", most=LAST_PORT)
    dtype: str = setting(
        "auto",
        "Type to compute in; auto = bfloat16 if the hardware multiplies it, else float32. "
        "CPUs keep weights as they are stored with float32, from AVX2 on.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    weights: str = setting(
        "full",
        "Format of the weights in memory; full = the checkpoint's own where this machine computes "
        "with it, else --dtype; mapped (CPU) = codes stay in the checkpoint's files, for models "
        "larger than memory; decoded = --dtype; int4 and int8 (CPU) and fp8 (GPU) = rounded; "
        "w8a8 (AMX, AVX-512 BF16) = int8, with the inputs of products in int8 too.",
        choices=("full", "mapped", "decoded", "int4", "int8", "w8a8", "fp8"),
    )
    packed_cache: str = setting(
        "",
        "Directory that keeps the weights as a CPU packs them, so that later starts read them; "
        "empty = they are packed at every start.",
    )
    kv_dtype: str = setting(
        "auto",
        "Type of cached keys and values; auto = --dtype, but float16 on a CPU where --dtype is not "
        "stated and would be float32; int8 (CPU) and fp8 (GPU) = rounded, with a scale for each "
        "head and token.",
        choices=("auto", "float32", "bfloat16", "float16", "int8", "fp8"),
    )
    state_dtype: str = setting(
        "float32",
        "Type of the states of recurrent layers between steps; bfloat16 halves them. Without "
        "effect on other models.",
        choices=("float32", "bfloat16"),
    )
    model_code: str = setting(
        "auto",
        "Code that computes the model: native, or transformers' modules with our attention and "
        "products; auto = native where there is such code.",
        choices=("auto", "native", "transformers"),
    )
    generation_config: bool = setting(
        False,
        "Sample as generation_config.json recommends where a request says nothing.",
    )
    adapters: str = setting(
        "",
        "LoRA adapters to load: name=directory, separated by commas. Requests ask for one as their "
        "model.",
    )
    max_adapters: int = setting(32, "Adapters in memory, at most; 0 = none.", most=4096)
    pooling: str = setting(
        "auto",
        "Pooling of embeddings; auto = as modules.json says. With another value any decoder makes "
        "embeddings: the mean of its hidden states, or that of the last token.",
        choices=("auto", "cls", "mean", "last"),
    )
    device: str = setting(
        "auto",
        "Device of the computation; auto = a GPU if there is one.",
        choices=("auto", "cpu", "cuda"),
    )
    attention: str = setting(
        "auto",
        "Kernels of attention on a GPU; auto = the fastest; xformers = its split-K for decodes.",
        choices=("auto", "xformers"),
    )
    dependent_launch: bool = setting(
        False,
        "Start a kernel while the one before it ends (programmatic dependent launch), on NVIDIA's "
        "GPUs of compute capability 9.0 or higher.",
    )
    grammar: str = setting(
        "",
        "Grammar services: host:port, dns:///name:port or unix:/path, separated by commas; "
        "empty = no grammars.",
    )
    grammar_wait: float = setting(
        60.0, "Seconds that constrained requests wait for a lost grammar service."
    )
    lost_seconds: float = setting(
        LOST_SECONDS, "Seconds of silence after which the grammar service counts as lost.", least=1
    )
    threads: int = setting(0, "Compute threads; 0 = one per core.", most=4096)
    kv_memory: str = setting(
        "auto",
        "Memory of the KV cache: an amount, such as 4GiB, or a share of what is free after the "
        "weights, such as 25%; auto = 50% (with mapped weights 12.5%, on a GPU what is left).",
    )
    context_length: str = setting(
        "auto",
        "Tokens of a sequence, at most; max = as many as the checkpoint states, auto = as many of "
        "them as the KV cache holds.",
    )
    max_running: int = setting(
        0,
        "Sequences that run at the same time, at most; 0 = 256, and on a GPU up to 1,024 if its "
        "memory holds so many.",
    )
    max_waiting: int = setting(1024, "Sequences that may wait, at most; more are refused.", least=1)
    max_step_tokens: int = setting(
        0, "Prompt tokens of one step, at most; 0 = 4,096, and 8,192 on a large GPU."
    )
    mixed_step_factor: float = setting(
        1.7,
        "Time of a step with prompts and decodes, at most, as a multiple of one without prompts.",
        least=1.01,
    )
    speculate: str = setting(
        "auto",
        "Draft tokens, which never change the output: auto = from the answers that clients expect, "
        "and on a CPU from an MTP layer of the checkpoint; mtp = from the MTP layer on a GPU, too; "
        "ngram = from such answers and repetitions in the sequence.",
        choices=("off", "auto", "ngram", "mtp"),
    )
    draft: str = setting(
        "",
        "Draft model, which proposes draft tokens where they save time: the directory or GGUF file "
        "of a smaller model with the same vocabulary, or the directory of an EAGLE-3 head or of "
        "Gemma 4's assistant; empty = none.",
    )
    vision: str = setting(
        "auto",
        "Images in prompts; auto = if the checkpoint has a vision tower.",
        choices=("auto", "off"),
    )
    image_memory: str = setting(
        "512MiB", "Memory of encoded images that requests may use again; 0 = none."
    )
    held_image_memory: str = setting(
        "1GiB", "Memory of the encoded images of running and waiting requests; more are refused."
    )
    silence_seconds: float = setting(
        60.0,
        "Seconds of one step after which the service reports itself as not serving.",
        least=INSTANT,
    )
    vllm_metrics: bool = setting(
        False,
        "Serve the metrics also under vLLM's names, for dashboards and routers that know them.",
    )
    max_logprobs: int = setting(20, "Candidates in the scores of a token, at most.", most=128)

    def __post_init__(self) -> None:
        if self.packed_cache and self.weights == "mapped":
            raise StartupError(
                "--packed-cache: nothing is packed with --weights mapped. Start without one of "
                "them."
            )
        if self.draft and self.speculate in ("off", "mtp"):
            raise StartupError(
                f"--draft: --speculate {self.speculate} ignores it. Start without one of them."
            )
        if self.kv_memory != "auto" and parse_share(self.kv_memory) is None:
            parse_bytes(self.kv_memory)
        if self.context_length not in ("auto", "max"):
            parse_tokens(self.context_length)
        if self.grammar:
            parse_targets(self.grammar, "--grammar")
        parse_bytes(self.image_memory)
        parse_bytes(self.held_image_memory)


def parse_bytes(text: str) -> int:
    """Return the bytes of "512MiB", "4GiB", "2G" or "1000000". Raises StartupError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise StartupError(
            f"{text!r} is not an amount of memory; write for example 4GiB or 512MiB."
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


def parse_share(text: str) -> float | None:
    """Return 0.25 for "25%", None for an amount. Raises StartupError for less than 1% or over 99%.

    The rest of the memory is for steps, images and other programs.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
    if match is None:
        return None
    share = float(match[1]) / 100
    if not 0.01 <= share <= 0.99:
        raise StartupError(f"--kv-memory must be between 1% and 99%, or an amount, not {text}.")
    return share


def parse_tokens(text: str) -> int:
    """Return the number of --context-length. Raises StartupError."""
    if not re.fullmatch(r"[1-9]\d{0,9}", text.strip()):
        raise StartupError(
            f"--context-length must be a number of tokens, max or auto, not {text!r}."
        )
    return int(text)
