"""Choice of experts of a GGUF file, as keys of config.json."""

from services.common.gguf.gguf_file import GgufError, GgufFile
from services.common.gguf.gguf_layers import count_layers
from services.common.json_values import Json

__all__ = [
    "SIGMOIDS",
    "layers_with_routers",
    "read_hunyuan_routing",
    "read_routing",
    "read_sigmoid_routing",
]

SIGMOIDS = 2
"""llama.cpp's number of the sigmoid as function of experts' scores; 0 = the model's own function"""


def read_routing(file: GgufFile) -> dict[str, Json]:
    """Return the keys of the experts: choice, weights, layers with experts, shared experts."""
    own = file.own
    groups = file.count(own("expert_group_count"), 1)
    return {
        "moe_layer_start_index": file.count(own("leading_dense_block_count"), 0, least=0),
        "moe_num_shared_experts": file.count(own("expert_shared_count"), 0, least=0),
        "n_group": groups,
        "norm_topk_prob": file.flag(own("expert_weights_norm"), False),
        "num_nextn_predict_layers": 0,
        "routed_scaling_factor": file.positive(own("expert_weights_scale"), 1.0),
        "topk_group": file.count(own("expert_group_used_count"), 1, most=groups),
    }


def read_sigmoid_routing(file: GgufFile) -> dict[str, Json]:
    """Return the keys of `read_routing` for experts that sigmoids weigh.

    Raises GgufError if another function weighs them.
    """
    key = file.own("expert_gating_func")
    if (gating := file.integer(key, 0)) not in (0, SIGMOIDS):
        raise GgufError(f"{file.path}: {key} must be {SIGMOIDS}, for sigmoids, got {gating}.")
    return read_routing(file)


def layers_with_routers(file: GgufFile) -> list[bool]:
    """Return for each layer whether it has a router of experts."""
    layers = range(count_layers(file))
    return [f"blk.{layer}.ffn_gate_inp.weight" in file.tensors for layer in layers]


def read_hunyuan_routing(file: GgufFile) -> dict[str, Json]:
    """Return the keys of `read_sigmoid_routing` for Hunyuan 3, whose files leave two counts out.

    The first layers have no router, and a shared expert is as wide as any other expert.
    """
    own, have_routers = file.own, layers_with_routers(file)
    width = file.count(own("expert_feed_forward_length"))
    return {
        **read_sigmoid_routing(file),
        "moe_layer_start_index": next(
            (layer for layer, has_router in enumerate(have_routers) if has_router),
            len(have_routers),
        ),
        "moe_num_shared_experts": file.count(own("expert_shared_feed_forward_length"), width)
        // width,
    }
