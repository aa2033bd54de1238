"""Typed architecture of a checkpoint, read from config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from services.common.json_values import Json
from services.engine.model.architecture.disentangled import DisentangledSpec
from services.engine.model.architecture.experts_reader import averages_shared_expert
from services.engine.model.architecture.layer_reader import read_layers
from services.engine.model.architecture.layers import (
    BesideSpec,
    ExpertsSpec,
    LayerSpec,
    ParallelSpec,
)
from services.engine.model.architecture.lightning_reader import residual_factor
from services.engine.model.architecture.modal_tokens import ModalTokens, read_modal_tokens
from services.engine.model.architecture.model_layers import ModelLayers, read_config
from services.engine.model.architecture.weight_factors import (
    WeightFactors,
    read_value_factor,
    read_weight_factors,
    shared_expert_factors,
)
from services.engine.model.checkpoint.config import CheckpointError, Config
from services.engine.model.checkpoint.family import Family, ImageSight
from services.engine.model.checkpoint.fp8 import Fp8Format
from services.engine.model.checkpoint.schemes import SCHEMES, Scheme
from services.engine.model.checkpoint.task_names import (
    STACKED_TASKS,
    TASKS_IN_DIRECTORIES,
    read_tasks,
)

__all__ = ["ModelSpec", "dtype_of", "quantization_of"]


@dataclass(frozen=True, slots=True)
class ModelSpec(ModelLayers):
    """Shape and constants of a model: all that the forward pass needs besides weights."""

    vocab_size: int
    """Width of the logits"""
    context_length: int
    """Maximum tokens of a sequence"""
    norm_epsilon: float
    tied_embeddings: bool
    """True if the output projection is the embedding table"""
    logit_cap: float
    """Soft cap on the logits; 0: none"""
    embedding_scale: float
    residual_scale: float
    """Factor on the outputs that mixers and feed-forward layers add to the residual"""
    logit_scale: float
    parallel_residual: bool
    """True if a layer's feed-forward layer reads the residual that its mixer reads"""
    head_bias: bool
    """True if the output projection has a bias"""
    dtype: str
    """Dtype of the stored weights according to config.json: float32, bfloat16 or float16"""
    fp8: Fp8Format | None
    """Format of the weights that are stored as FP8 instead; None: there are none"""
    scheme: Scheme | None
    """Way in which quantized weights are stored; None: there are none"""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    input_vocab_size: int = 0
    """Number of ids that have inputs of their own for each layer; 0: none"""
    pad_token_id: int | None = None
    """Id by which image tokens look up their per-layer inputs; None: by their own id"""
    modal_tokens: tuple[ModalTokens, ...] = ()
    """Tokens that the text's table does not embed"""
    position_offset: int = 0
    """Number of the first learned position"""
    num_token_types: int = 0
    """Number of texts that an encoder tells apart in a pair; 0: none"""
    num_draft_layers: int = 0
    """Number of further layers that files may hold: they predict further tokens (MTP)"""
    draft_layers_have_windows: bool = False
    """True if the file says that these layers have the windows of the others"""
    weight_factors: tuple[WeightFactors, ...] = ()
    """Factors by which weights are multiplied at loading"""
    num_labels: int = 0
    """Number of scores of a text; 0: the checkpoint has no head that scores texts"""
    stored_vocab_size: int = 0
    """Rows of the tokens' tables, of which the first `vocab_size` are used; 0: `vocab_size`"""
    tasks: tuple[str, ...] = ()
    """Tasks whose adapters the checkpoint holds"""
    disentangled: DisentangledSpec | None = None
    """Products of tokens with their distance, in all layers; None: there are none"""

    @property
    def has_pair_scores(self) -> bool:
        """True if an encoder's scores have an addend that depends on the distance of two tokens."""
        encoder = self.family.encoder
        if encoder is None:
            return False
        has_bias = encoder.attention_bias is not None or self.family.has_alibi
        return has_bias or self.disentangled is not None

    @property
    def architecture(self) -> str:
        return self.family.architecture

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def has_grid_positions(self) -> bool:
        """True if the tokens of an image have a row and a column."""
        rotaries = (layer.rotary for layer in self.attention_layers.values())
        return any(rotary is not None and rotary.axes for rotary in rotaries)

    @property
    def images_see_ahead(self) -> bool:
        """True if a layer shows a token of an image the later tokens of this image."""
        return self.family.image_sight is not ImageSight.NONE

    @property
    def widest_head(self) -> int:
        """Largest head dimension of attention with keys of its own; 0: there is none."""
        layers = self.attention_layers.values()
        return max((max(layer.head_dim, layer.value_dim) for layer in layers), default=0)

    @property
    def has_experts(self) -> bool:
        """True if a layer is a mixture of experts."""
        kinds = (ExpertsSpec, BesideSpec)
        return any(isinstance(layer.content, kinds) for layer in self.layers)

    @property
    def gates_experts(self) -> bool:
        """True if all experts have a gate."""
        layers = (layer.content for layer in self.layers)
        experts = (each.experts if isinstance(each, BesideSpec) else each for each in layers)
        return all(each.activation.gated for each in experts if isinstance(each, ExpertsSpec))

    @property
    def input_width(self) -> int:
        """Width of the input that a token has for each layer alone; 0: there is none."""
        return self.layers[0].input_width

    @property
    def keeps_embedding(self) -> bool:
        """True if layers read the embedding beside the residual."""
        return any(layer.shared_block is not None for layer in self.layers)

    @property
    def joins_inputs(self) -> bool:
        """True if mixers read twice the residual's width: two parts side by side."""
        return any(layer.input_width for layer in self.attention_layers.values())

    @property
    def has_shortcuts(self) -> bool:
        """True if the output of some experts joins the residual at the end of the next layer."""
        return any(layer.follows_shortcut for layer in self.layers)

    @property
    def num_streams(self) -> int:
        """Number of streams of AltUp or of hyper-connections; 0: the residual is a sum."""
        streams = self.layers[0].altup or self.layers[0].hyper
        return 0 if streams is None else streams.streams

    @staticmethod
    def from_config(values: Mapping[str, Json], file: str = "config.json") -> "ModelSpec":
        """Read the parsed config.json `values`; errors call it `file`.

        Raises CheckpointError for an unknown architecture, a missing or mistyped value, and values
        that contradict one another.
        """
        family, config = read_config(values, file)
        stored_as = quantization_of(config, family)
        hidden_size = config.positive("hidden_size")
        context_length = config.positive("max_position_embeddings")
        encoder = family.encoder
        padding = 0
        if encoder is not None and encoder.positions_after_padding:
            padding = config.integer("pad_token_id") + 1

        bos_token_ids = config.ids("bos_token_id")
        layers = read_layers(
            config, family, hidden_size, context_length, has_mxfp4=stored_as == "mxfp4"
        )
        input_vocab_size = 0
        if layers[0].input_width:
            input_vocab_size = config.positive("vocab_size_per_layer_input")
        return ModelSpec(
            family=family,
            vocab_size=config.positive("vocab_size"),
            context_length=context_length - padding,
            hidden_size=hidden_size,
            layers=layers,
            norm_epsilon=config.positive_number("rms_norm_eps", 1e-6),
            tied_embeddings=config.flag("tie_word_embeddings", False) or not family.has_logits,
            logit_cap=config.number("final_logit_softcapping", 0.0)
            if family.reads_soft_caps
            else 0.0,
            embedding_scale=hidden_size**0.5
            if family.scaled_embedding and _is_set(config, family.embedding_key)
            else _multiplier(config, family, "embedding_multiplier"),
            residual_scale=_residual_scale(config, family),
            logit_scale=_logit_scale(config, family, hidden_size),
            parallel_residual=family.reads_parallel_residual
            and config.flag("use_parallel_residual", False),
            head_bias=family.head_bias_key is not None and config.flag(family.head_bias_key, False),
            dtype=dtype_of(config),
            fp8=stored_as if isinstance(stored_as, Fp8Format) else None,
            scheme=stored_as if isinstance(stored_as, Scheme) else None,
            eos_token_ids=config.ids("eos_token_id"),
            bos_token_id=bos_token_ids[0] if bos_token_ids else None,
            input_vocab_size=input_vocab_size,
            pad_token_id=_pad_token_id(config, input_vocab_size)
            if input_vocab_size and family.is_gemma4
            else None,
            modal_tokens=read_modal_tokens(config) if family.has_modal_tokens else (),
            position_offset=padding or family.position_offset,
            num_draft_layers=_draft_layers(config),
            draft_layers_have_windows=config.has("mtp_layer_types")
            and "sliding_attention" in config.texts("mtp_layer_types"),
            num_token_types=0
            if encoder is None or encoder.token_types is None
            else config.integer("type_vocab_size", 2),
            weight_factors=_weight_factors(config, family, layers[0]),
            num_labels=_num_labels(config) if family.head else 0,
            stored_vocab_size=config.integer("stored_vocab_size", 0),
            tasks=_tasks(config, family),
            disentangled=DisentangledSpec.from_config(config)
            if encoder is not None and encoder.is_disentangled
            else None,
        )


def _tasks(config: Config, family: Family) -> tuple[str, ...]:
    """Return the tasks whose adapters a checkpoint holds. Raises CheckpointError for odd names."""
    if family.has_task_adapters:
        return read_tasks(config, TASKS_IN_DIRECTORIES)
    has_tasks = family.encoder is not None and family.encoder.has_tasks
    return read_tasks(config, STACKED_TASKS) if has_tasks else ()


def _weight_factors(config: Config, family: Family, layer: LayerSpec) -> tuple[WeightFactors, ...]:
    if averages_shared_expert(config, family):
        return shared_expert_factors(family, 0.5)
    if not isinstance(layer.mixer, ParallelSpec):
        return read_value_factor(config, family)
    return read_weight_factors(config, family, layer.mixer.mamba)


def quantization_of(config: Config, family: Family) -> Fp8Format | Scheme | Literal["mxfp4"] | None:
    """Return how weights are quantized. Raises CheckpointError for an unsupported method."""
    if not config.has("quantization_config"):
        return None
    section = config.section("quantization_config")
    method = section.text("quant_method", "unnamed")
    if Fp8Format.is_fp8(section):
        return Fp8Format.from_config(section)
    if method in SCHEMES:
        return SCHEMES[method](section)
    if method == "mxfp4" and family.names.experts is not None and family.names.experts.are_stacked:
        return "mxfp4"
    raise CheckpointError(
        f"{config.file}: quantization_config ({method}) is not supported. Supported: "
        f"fp8, {', '.join(SCHEMES)}, and mxfp4 for the experts of gpt-oss; or serve a float32, "
        "bfloat16 or float16 checkpoint."
    )


def _is_set(config: Config, key: str | None) -> bool:
    """Return whether a flag is true; if the family has no such key, it counts as true."""
    return key is None or config.flag(key, False)


def _residual_scale(config: Config, family: Family) -> float:
    if family.has_normed_residual:
        return residual_factor(config)
    if family.reads_depth and config.has("scale_depth"):
        depth: float = config.positive("num_hidden_layers") ** 0.5
        return config.positive_number("scale_depth") / depth
    return _multiplier(config, family, "residual_multiplier")


def _draft_layers(config: Config) -> int:
    """Return the number of layers after the others that predict further tokens."""
    count = config.integer("num_nextn_predict_layers", 0)
    most = config.positive("num_hidden_layers")
    if not 0 <= count <= most:
        raise CheckpointError(
            f"{config.file}: num_nextn_predict_layers must be from 0 to {most}, got {count}."
        )
    return count


def _pad_token_id(config: Config, vocab_size: int) -> int:
    """Return the id by which image tokens look up their per-layer inputs."""
    found = config.integer("pad_token_id", 0)
    if not 0 <= found < vocab_size:
        raise CheckpointError(
            f"{config.file}: pad_token_id must be from 0 to {vocab_size - 1}, got {found}."
        )
    return found


def _logit_scale(config: Config, family: Family, hidden_size: int) -> float:
    if family.reads_logit_scale:
        return config.positive_number("logit_scale")
    if family.reads_depth:
        return config.positive_number("dim_model_base", hidden_size) / hidden_size
    return 1 / _multiplier(config, family, "logits_scaling")


def _multiplier(config: Config, family: Family, key: str) -> float:
    return config.positive_number(key, 1.0) if family.reads_multipliers else 1.0


def _num_labels(config: Config) -> int:
    """Return the number of a classifier's labels, whose file lists or counts them."""
    names = config.section("id2label").values
    return len(names) or config.positive("num_labels", 2)


def dtype_of(config: Config) -> str:
    """Return the dtype of stored weights. Raises CheckpointError for an unsupported one."""
    # transformers 5 writes dtype, older releases torch_dtype.
    dtype = config.text("dtype" if config.has("dtype") else "torch_dtype", "float32")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise CheckpointError(
            f"{config.file}: dtype {dtype} is not supported. Supported: float32, bfloat16, float16."
        )
    return dtype
