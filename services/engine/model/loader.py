"""From a checkpoint directory to a decoder that can run."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from services.common.settings import StartupError
from services.engine.attention import choose_backend
from services.engine.kernels.amx import runs_on_amx
from services.engine.kernels.library import native
from services.engine.model.checkpoint import Checkpoint
from services.engine.model.config import Config
from services.engine.model.decoder import Decoder, DecoderLayer, DecoderWeights
from services.engine.model.errors import CheckpointError
from services.engine.model.int8_operators import Int8Operators
from services.engine.model.native_operators import AmxOperators, NativeOperators
from services.engine.model.operators import Operators
from services.engine.model.precision import resolve_dtype
from services.engine.model.progress import LoadProgress
from services.engine.model.spec import ModelSpec
from services.engine.model.torch_operators import TorchOperators

__all__ = [
    "CheckpointError",
    "GenerationDefaults",
    "load_generation_defaults",
    "load_model",
    "load_spec",
    "resolve_dtype",
]


_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The sampling its makers recommend (generation_config.json); None where it says nothing."""

    temperature: float | None = None
    """0 where do_sample is false"""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def load_spec(path: str | Path) -> ModelSpec:
    """Reads config.json and the EOS ids of generation_config.json, which may name several.

    Raises CheckpointError.
    """
    directory = Path(path)
    config = Checkpoint.config(directory)
    spec = ModelSpec.from_config(config.values, config.file)
    if eos_token_ids := _generation_config(directory).ids("eos_token_id"):
        spec = dataclasses.replace(spec, eos_token_ids=eos_token_ids)
    return spec


def load_generation_defaults(path: str | Path) -> GenerationDefaults:
    """Raises CheckpointError when generation_config.json is there but malformed."""
    config = _generation_config(Path(path))

    def number(key: str) -> float | None:
        return config.number(key) if config.has(key) else None

    greedy = config.has("do_sample") and not config.flag("do_sample", True)
    return GenerationDefaults(
        temperature=0.0 if greedy else number("temperature"),
        top_p=number("top_p"),
        top_k=config.integer("top_k") if config.has("top_k") else None,
        min_p=number("min_p"),
        repetition_penalty=number("repetition_penalty"),
    )


def load_model(
    path: str | Path,
    dtype: torch.dtype,
    *,
    progress: bool = False,
    device: torch.device = _CPU,
    weights: str = "full",
) -> Decoder:
    """Loads a checkpoint, one layer at a time from the mapped files.

    progress: show a bar on a terminal, or log a few lines where there is none.
    weights: "full", in `dtype`, or "int8", rounded to that for all products.
    Raises CheckpointError; nothing is loaded unless every tensor is there in its right shape.
    Raises StartupError where this machine can't multiply int8 weights.
    """
    directory = Path(path)
    spec = load_spec(directory)
    operators = _choose_operators(spec, dtype, device, weights)
    with Checkpoint(directory) as checkpoint:
        wanted, ignored = _tensors(spec)
        checkpoint.require(wanted, ignored)
        total = sum(checkpoint.tensors[name].num_bytes for name in wanted)
        bar = LoadProgress(total, shown=progress)
        try:
            tensors = _Reader(checkpoint, spec, dtype, device, operators, bar).weights()
        finally:
            bar.finish()
    return Decoder(spec, dtype, tensors, operators, choose_backend(spec, dtype, device))


class _Reader:
    """Reads a Llama-like checkpoint's tensors into what the decoder computes with."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        operators: Operators,
        bar: LoadProgress,
    ) -> None:
        self._checkpoint = checkpoint
        self._spec = spec
        self._dtype = dtype
        self._device = device
        self._operators = operators
        self._bar = bar

    def weights(self) -> DecoderWeights:
        spec = self._spec
        # While file and model agree on the dtype this stays a view of the mapped file: the rows a
        # step looks up are few, and the pages are the kernel's to drop.
        embedding = self._read("model.embed_tokens.weight").to(self._device, self._dtype)
        layers = tuple(self._layer(f"model.layers.{index}.") for index in range(spec.num_layers))
        final_norm = self._small("model.norm.weight")
        head = embedding if spec.tied_embeddings else self._read("lm_head.weight")
        return DecoderWeights(
            embedding=embedding,
            layers=layers,
            final_norm=final_norm,
            output=self._operators.projection(head, None),
            num_bytes=self._step_bytes(),
        )

    def _layer(self, prefix: str) -> DecoderLayer:
        spec, operators = self._spec, self._operators
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        qkv = [f"{attention}{name}_proj" for name in "qkv"]
        return DecoderLayer(
            attention_norm=self._small(f"{prefix}input_layernorm.weight"),
            qkv=operators.projection(
                torch.cat([self._read(f"{name}.weight") for name in qkv]),
                torch.cat([self._read(f"{name}.bias") for name in qkv]) if spec.qkv_bias else None,
            ),
            query_norm=self._small(f"{attention}q_norm.weight") if spec.qk_norm else None,
            key_norm=self._small(f"{attention}k_norm.weight") if spec.qk_norm else None,
            output=operators.projection(
                self._read(f"{attention}o_proj.weight"),
                self._bias(f"{attention}o_proj", spec.output_bias),
            ),
            feed_forward_norm=self._small(f"{prefix}post_attention_layernorm.weight"),
            gate=operators.gate(
                self._read(f"{mlp}gate_proj.weight"),
                self._read(f"{mlp}up_proj.weight"),
                self._bias(f"{mlp}gate_proj", spec.mlp_bias),
                self._bias(f"{mlp}up_proj", spec.mlp_bias),
            ),
            down=operators.projection(
                self._read(f"{mlp}down_proj.weight"),
                self._bias(f"{mlp}down_proj", spec.mlp_bias),
            ),
        )

    def _bias(self, module: str, present: bool) -> Tensor | None:
        return self._read(f"{module}.bias") if present else None

    def _small(self, name: str) -> Tensor:
        """A norm's weight, copied out of the file."""
        return self._read(name).to(self._device, self._dtype, copy=True)

    def _read(self, name: str) -> Tensor:
        self._bar.add(self._checkpoint.tensors[name].num_bytes)
        return self._checkpoint.tensor(name)

    def _step_bytes(self) -> int:
        wanted, _ = _tensors(self._spec)
        if not self._spec.tied_embeddings:
            del wanted["model.embed_tokens.weight"]
        return sum(
            self._operators.weight_bytes(*shape)
            if len(shape) == 2
            else math.prod(shape) * self._dtype.itemsize
            for shape in wanted.values()
        )


def _tensors(spec: ModelSpec) -> tuple[dict[str, tuple[int, ...]], frozenset[str]]:
    """The tensors the checkpoint must hold, names to shapes, and those it may hold in vain."""
    hidden, inner, vocab = spec.hidden_size, spec.intermediate_size, spec.vocab_size
    attended, cached = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    wanted: dict[str, tuple[int, ...]] = {}
    ignored: set[str] = set()

    def linear(name: str, outputs: int, inputs: int, bias: bool) -> None:
        wanted[f"{name}.weight"] = (outputs, inputs)
        if bias:
            wanted[f"{name}.bias"] = (outputs,)

    wanted["model.embed_tokens.weight"] = (vocab, hidden)
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        wanted[f"{prefix}input_layernorm.weight"] = (hidden,)
        linear(f"{prefix}self_attn.q_proj", attended, hidden, spec.qkv_bias)
        linear(f"{prefix}self_attn.k_proj", cached, hidden, spec.qkv_bias)
        linear(f"{prefix}self_attn.v_proj", cached, hidden, spec.qkv_bias)
        if spec.qk_norm:
            wanted[f"{prefix}self_attn.q_norm.weight"] = (spec.head_dim,)
            wanted[f"{prefix}self_attn.k_norm.weight"] = (spec.head_dim,)
        linear(f"{prefix}self_attn.o_proj", hidden, attended, spec.output_bias)
        wanted[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
        linear(f"{prefix}mlp.gate_proj", inner, hidden, spec.mlp_bias)
        linear(f"{prefix}mlp.up_proj", inner, hidden, spec.mlp_bias)
        linear(f"{prefix}mlp.down_proj", hidden, inner, spec.mlp_bias)
        # Old conversions stored the frequencies, which config.json determines.
        ignored.add(f"{prefix}self_attn.rotary_emb.inv_freq")
    wanted["model.norm.weight"] = (hidden,)
    if spec.tied_embeddings:
        ignored.add("lm_head.weight")
    else:
        wanted["lm_head.weight"] = (vocab, hidden)
    return wanted, frozenset(ignored)


def _generation_config(directory: Path) -> Config:
    file = directory / "generation_config.json"
    return Config.read(file) if file.exists() else Config(str(file), {})


def _choose_operators(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, weights: str
) -> Operators:
    """The fastest operators that this machine, this dtype and this shape allow."""
    if weights == "int8":
        if native is None or not runs_on_amx(spec, dtype, device):
            raise StartupError(
                "--weights int8 needs a CPU with AMX, the compiled kernels, --dtype bfloat16 and "
                "layers whose widths are multiples of 32; start without it."
            )
        return Int8Operators(native)
    if native is None or device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return TorchOperators(dtype, device)
    if runs_on_amx(spec, dtype, device):
        return AmxOperators(native)
    return NativeOperators(native, dtype)
