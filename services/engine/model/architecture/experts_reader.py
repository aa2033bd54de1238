"""Mixtures of experts, read from config.json."""

from dataclasses import replace

from services.engine.model.architecture.layers import DenseSpec, ExpertsSpec
from services.engine.model.architecture.routing import Routing, Scoring
from services.engine.model.checkpoint.config import CheckpointError, Config
from services.engine.model.checkpoint.family import Family

__all__ = ["averages_shared_expert", "expert_layers", "num_experts", "read_experts"]

_SPARSE_MIXER = 2
"""Number of experts that SparseMixer chooses for a token"""


def expert_layers(config: Config, family: Family, num_layers: int) -> set[int]:
    """Return the layers that are mixtures of experts. Raises CheckpointError for unknown rules."""
    if family.routes_by_token:
        return set(range(num_layers))
    if config.has("mlp_layer_types"):
        kinds = config.kind_per_layer("mlp_layer_types", num_layers, ("dense", "sparse"))
        return {layer for layer, kind in enumerate(kinds) if kind == "sparse"}
    if config.has("expert_layer_period"):  # one expert is a dense layer
        period, offset = (
            config.positive("expert_layer_period"),
            config.integer("expert_layer_offset"),
        )
        if num_experts(config) == 1:
            return set()
        return {layer for layer in range(num_layers) if layer % period == offset}
    if config.has("moe_every_n_layers"):
        every = config.positive("moe_every_n_layers")
        return {layer for layer in range(num_layers) if layer % every == 1}
    if config.has("moe_layers"):
        return set(config.ids("moe_layers"))
    if isinstance(config.values.get("moe_layer_freq"), list):
        marks = config.integers("moe_layer_freq")
        if len(marks) != num_layers:
            raise CheckpointError(
                f"{config.file}: moe_layer_freq names {len(marks)} layers, num_hidden_layers "
                f"{num_layers}."
            )
        return {layer for layer, mark in enumerate(marks) if mark}
    if (every := config.integer("moe_layer_freq", 1)) != 1:
        raise CheckpointError(f"{config.file}: moe_layer_freq {every} is not supported.")
    plain, step = config.ids("mlp_only_layers"), config.positive("decoder_sparse_step", 1)
    first, last = config.integer("moe_layer_start_index", 0), -1
    if config.has("moe_layer_end_index"):
        last = config.integer("moe_layer_end_index")
    layers = range(max(first, 0), num_layers if last == -1 else last + 1)
    return {layer for layer in layers if layer not in plain and (layer + 1) % step == 0}


def num_experts(config: Config) -> int:
    """Return the number of experts of a layer; 0 in dense models, such as those of Granite 4."""
    # transformers 5 writes num_local_experts for every family, older releases Qwen's num_experts.
    key = "num_experts" if config.has("num_experts") else "num_local_experts"
    count = config.integer(key)
    if count < 0:
        raise CheckpointError(
            f"{config.file}: {config.file_key(key)} must not be negative, got {count}."
        )
    return count


def read_experts(
    config: Config, family: Family, dense: DenseSpec, per_token: int, *, has_mxfp4: bool
) -> ExpertsSpec:
    """Read the experts of a layer. dense: the layer's shape if it had no experts.

    per_token: experts of a token; has_mxfp4: they are stored as MXFP4. Raises CheckpointError for
    values that contradict one another.
    """
    count, identities = num_experts(config), _identities(config)
    if per_token > count + identities:
        raise CheckpointError(
            f"{config.file}: {config.file_key('num_experts_per_tok')} ({per_token}) exceeds the "
            f"{count + identities} experts."
        )
    width = config.positive("moe_intermediate_size", dense.width)
    assert family.names.experts is not None
    shared = config.positive("moe_num_shared_experts") if family.names.experts.shared_stack else 0
    routing = _routing(config, family, count, per_token)
    return ExpertsSpec(
        count=count + shared,
        routing=replace(routing, per_token=per_token + shared),
        width=width,
        activation=dense.activation,
        has_bias=dense.has_bias and family.experts_have_bias,
        is_mxfp4=has_mxfp4,
        shared=_shared_expert(config, family, dense, width),
        identities=identities,
        weighed_shared=shared,
    )


def _identities(config: Config) -> int:
    """Count the experts without weights. Raises CheckpointError unless they return their rows."""
    count, kind = config.integer("zero_expert_num", 0), config.text("zero_expert_type", "identity")
    if count < 0:
        raise CheckpointError(f"{config.file}: zero_expert_num must not be negative, got {count}.")
    if kind != "identity":
        raise CheckpointError(
            f"{config.file}: zero_expert_type {kind} is not supported here. Supported: identity."
        )
    return count


def averages_shared_expert(config: Config, family: Family) -> bool:
    """Return whether a layer with experts adds the mean of the shared expert and the others' sum.

    Raises CheckpointError for another combination than the mean and the sum.
    """
    if not family.reads_combination or config.integer("moe_num_shared_experts") <= 0:
        return False
    strategy, known = config.text("shared_expert_combination_strategy"), ("average", "sum")
    if strategy not in known:
        raise CheckpointError(
            f"{config.file}: shared_expert_combination_strategy {strategy} is not supported. "
            f"Supported: {', '.join(known)}."
        )
    return strategy == "average"


def _routing(config: Config, family: Family, count: int, per_token: int) -> Routing:
    assert family.names.experts is not None
    jitter = None
    if family.mixes_sparsely:
        jitter = config.number("router_jitter_noise")
        if per_token != _SPARSE_MIXER:
            raise CheckpointError(
                f"{config.file}: num_experts_per_tok must be {_SPARSE_MIXER}, got {per_token}."
            )
    groups, kept_groups = _expert_groups(config, family, count, per_token)
    scoring, is_normalized = _scoring(config, family), config.flag("norm_topk_prob", False)
    if family.normalizes_softmax and scoring is Scoring.SOFTMAX:
        is_normalized = True  # a softmax over the chosen scores is a share of that over all
    scale = config.positive_number("routed_scaling_factor", 1.0)
    return Routing(
        per_token,
        is_normalized,
        has_bias=bool(family.names.experts.choice_bias) and config.flag("use_expert_bias", True),
        least_sum=config.number("moe_norm_min", 0.0),
        jitter=jitter,
        scoring=scoring,
        scales_inputs=family.scales_experts_inputs,
        groups=groups,
        kept_groups=kept_groups,
        group_leaders=2 if family.scores_by_sigmoid or family.ranks_groups_by_two else 1,
        scale=scale / 2 if averages_shared_expert(config, family) else scale,
    )


def _scoring(config: Config, family: Family) -> Scoring:
    if not family.scorings:
        return Scoring.SIGMOID if family.scores_by_sigmoid else Scoring.SOFTMAX
    name = config.text("scoring_func")
    if name not in family.scorings:
        raise CheckpointError(
            f"{config.file}: {config.file_key('scoring_func')} {name} is not supported here. "
            f"Supported: {', '.join(family.scorings)}."
        )
    return Scoring(name)


def _expert_groups(config: Config, family: Family, count: int, per_token: int) -> tuple[int, int]:
    """Return the numbers of groups of experts, and of groups that a token's are chosen from."""
    if family.names.latent is None and not family.scores_by_sigmoid:
        return 1, 1
    # dots.llm1 calls its sigmoids by the method of DeepSeek V3
    kinds = ("sigmoid", "noaux_tc") if family.scores_by_sigmoid else ("softmax",)
    methods = ("noaux_tc",) if family.scores_by_sigmoid else ("greedy", "group_limited_greedy")
    method, scores = config.text("topk_method", methods[0]), config.text("scoring_func", kinds[0])
    if method not in methods or scores not in kinds:
        raise CheckpointError(
            f"{config.file}: topk_method {method} with scoring_func {scores} is not supported "
            f"here. Supported: {', '.join(methods)} with {kinds[0]}."
        )
    if method == "greedy":
        return 1, 1
    groups, kept = config.positive("n_group", 1), config.positive("topk_group", 1)
    key = config.file_key("n_group")
    size = count // groups
    problem = None
    if count % groups:
        problem = f"{key} ({groups}) must divide the {count} experts"
    elif kept > groups:
        problem = f"topk_group ({kept}) must be at most {key} ({groups})"
    elif kept * size < per_token:
        problem = (
            f"topk_group ({kept}) groups of {size} experts have fewer than "
            f"num_experts_per_tok ({per_token})"
        )
    elif groups > kept and size < 2:
        problem = f"{key} ({groups}) makes groups of one expert, which are not supported"
    if problem is not None:
        raise CheckpointError(f"{config.file}: {problem}.")
    return groups, kept


def _shared_expert(
    config: Config, family: Family, dense: DenseSpec, width: int
) -> DenseSpec | None:
    """Return the shared expert, which may be as wide as several others together."""
    assert family.names.experts is not None
    if not family.names.experts.shared_gate:
        return None
    if not config.has("moe_num_shared_experts"):
        if config.integer("shared_expert_intermediate_size") == 0:
            return None
        return replace(dense, width=config.positive("shared_expert_intermediate_size"))
    count = config.integer("moe_num_shared_experts")
    return replace(dense, width=count * width) if count > 0 else None
