"""Survey of transformers' architectures: which are served, on whose code, and why others are not.

    python -m tests.unit.engine.architectures [NAME ...]

makes a small random checkpoint of each without a row of ours, serves it, compares its logits with
transformers', and without names writes docs/architectures.md.
"""

import dataclasses
import inspect
import json
import signal
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, logging
from transformers.integrations.heterogeneity.configuration_utils import (
    AmbiguousGlobalPerLayerAttributeError,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from services.common.model_files.draft_heads import is_draft_head
from services.engine.execution.model_loader import load_any_model
from services.engine.model.checkpoint.architectures import family_of
from services.engine.model.checkpoint.config import CheckpointError, Config
from services.engine.model.checkpoint.model_code import code_of
from tests.unit.engine.checkpoints.driver import Driver, random_tokens

__all__ = ["SMALL_SHAPES", "Finding", "architecture_names", "make_small", "page_of", "survey"]

TOLERANCE = 1e-3
_PAGE = Path("docs", "architectures.md")
_TOKENS = 40
_SECONDS = 30
"""Processor time of one architecture, after which it is given up"""
_SIZES: Mapping[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "embed_dim": 64,
    "embedding_size": 64,
    "word_embed_proj_dim": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "d_ff": 96,
    "d_inner": 96,
    "n_inner": 96,
    "ffn_hidden_size": 96,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "max_position_embeddings": 256,
    "max_seq_len": 256,
    "n_positions": 256,
    "n_ctx": 256,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_top_k": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "expert_hidden_size": 32,
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
    "num_dense_layers": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "qk_head_dim": 32,
    "v_head_dim": 16,
    "sliding_window": 16,
    "window_size": 16,
    "is_decoder": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Values of keys of config.json that configs have under these names"""
_TOWERS = {"audio_config", "audio_encoder", "audio_encoder_config", "vision_config", "vq_config"}
"""Parts of configs of models that read more than text"""
_OF_DEFAULTS = ("does not exist", "does not accept its config")
"""Parts of refusals that say nothing about a model: weights are missing, or transformers' defaults
contradict one another"""
SMALL_SHAPES: Mapping[str, Mapping[str, Any]] = {
    "big_bird": {"attention_type": "original_full"},
    "bloom": {"seq_length": 256},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "pegasus": {"bos_token_id": 1},
    "prophetnet": {"num_decoder_layers": 2, "num_encoder_layers": 2},
    "roc_bert": {"bos_token_id": 1, "eos_token_id": 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""Further values, by model_type"""


@dataclass(frozen=True, slots=True)
class Finding:
    """Outcome for one architecture."""

    name: str
    code: str
    """native, transformers, draft, refused, wrong, or failed: it could not be tried"""
    reason: str = ""
    """Why it is not served"""
    difference: float = 0.0
    """Largest difference of a logit from transformers'"""


def architecture_names() -> dict[str, str]:
    """Return a model_type for each causal architecture of the installed transformers."""
    found: dict[str, str] = {}
    for model_type, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        for name in (names,) if isinstance(names, str) else names:
            if name not in found or _matches(model_type, name):
                found[name] = model_type
    return found


def make_small(model_type: str, directory: Path) -> PreTrainedModel:
    """Save a small random checkpoint; return the model."""
    torch.manual_seed(3)
    config = _small_config(CONFIG_MAPPING[model_type], SMALL_SHAPES.get(model_type, {}))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.2, 0.2))
            else:
                parameter.copy_(torch.empty_like(parameter).normal_(0, 0.08))
    model.eval().save_pretrained(directory)  # type: ignore[no-untyped-call]
    return model


def survey(name: str, model_type: str, code: str = "auto") -> Finding:
    """Serve a small checkpoint of an architecture, and compare it with transformers.

    Families of ours are compared with it by their own tests, in several shapes.
    """
    if is_draft_head(name):
        return Finding(name, "draft")
    if code == "auto" and _has_row(name):
        return Finding(name, "native")
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        if set(CONFIG_MAPPING[model_type].sub_configs) & _TOWERS:
            return _of_config(name, model_type, directory, code)
        try:
            model = make_small(model_type, directory)
        except Exception:  # sizes that this model can't have
            return _of_config(name, model_type, directory, code)
        try:
            config = Config.read(directory / "config.json")
            runs_on = code_of(config, code)
            decoder = load_any_model(directory, torch.float32, code=code, weights="decoded")
        except CheckpointError as error:
            return Finding(name, "refused", str(error).replace(f"{directory}/", ""))
        # without padding, which some models skip when they count positions
        sequences = [random_tokens(_TOKENS, seed) % 90 + 3 for seed in (1, 2)]
        driver = Driver(decoder, sequences, block_size=32)
        driver.step([(0, 13), (1, 9)])
        driver.step([(0, 11), (1, 20)])
        for _ in range(8):
            driver.step([(0, 1), (1, 1)])
        worst = max(
            _difference(ours, _reference(model, tokens), len(ours))
            for ours, tokens in zip(driver.logits, sequences, strict=True)
        )
        if worst > TOLERANCE:
            return Finding(name, "wrong", "its logits differ from transformers'", worst)
        return Finding(name, runs_on.value, difference=worst)


def _has_row(name: str) -> bool:
    try:
        family_of(Config("config.json", {"architectures": [name]}))
    except CheckpointError:
        return False
    return True


def _of_config(name: str, model_type: str, directory: Path, code: str) -> Finding:
    """Return why a model is refused whose config.json has transformers' defaults. None of its
    weights are made."""
    values = {"architectures": [name], "model_type": model_type}
    (directory / "config.json").write_text(json.dumps(values))
    try:
        load_any_model(directory, torch.float32, code=code)
    except CheckpointError as error:
        reason = str(error).replace(f"{directory}/", "")
        if not any(cause in reason for cause in _OF_DEFAULTS):
            return Finding(name, "refused", reason)
    raise AssertionError(f"{name} was not refused for what it is")


def _small_config(
    kind: type[PreTrainedConfig], shapes: Mapping[str, Any], depth: int = 0
) -> PreTrainedConfig:
    accepted = inspect.signature(kind.__init__).parameters
    default = kind()
    aliases = getattr(kind, "attribute_map", {})
    values = {
        key: value
        for key, value in _SIZES.items()
        if key not in aliases and _has(default, key, accepted)
    }
    if values.get("kv_lora_rank") and "num_key_value_heads" in values:
        values["num_key_value_heads"] = values["num_attention_heads"]
    if "layer_types" in accepted and isinstance(getattr(default, "layer_types", None), list):
        kinds = list(dict.fromkeys(default.layer_types))
        values["layer_types"] = (kinds * 2)[: max(2, len(kinds))]
        for key in ("num_hidden_layers", "num_layers", "n_layer"):
            if key in values:
                values[key] = len(values["layer_types"])
    values |= shapes
    return kind(**values)


def _has(config: PreTrainedConfig, key: str, accepted: Collection[str]) -> bool:
    """Return whether a key can be set, and isn't null."""
    if key not in accepted and isinstance(getattr(type(config), key, None), property):
        return False
    try:
        return getattr(config, key) is not None or key == "pad_token_id"
    except AmbiguousGlobalPerLayerAttributeError:
        return True
    except AttributeError:
        return key in accepted


def _matches(model_type: str, name: str) -> bool:
    start = model_type.replace("_text", "").replace("_", "").replace("-", "")
    return name.lower().startswith(start)


@torch.no_grad()
def _reference(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=tokens[None], use_cache=False).logits[0]
    return logits


def _difference(ours: Tensor, theirs: Tensor, count: int) -> float:
    spread = max(1.0, float(theirs[:count].std()))
    worst = float((ours - theirs[:count]).abs().max()) / spread
    return worst if worst == worst else float("inf")


def _stop(*_: object) -> None:
    raise TimeoutError(f"it takes more than {_SECONDS} s of processor time")


def _found(name: str, model_type: str) -> Finding:
    signal.setitimer(signal.ITIMER_PROF, _SECONDS)
    try:
        return survey(name, model_type)
    except Exception as error:
        return Finding(name, "failed", " ".join(f"{type(error).__name__}: {error}".split())[:300])
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def page_of(findings: Sequence[Finding]) -> str:
    """Return docs/architectures.md."""
    of_code = {code: [f for f in findings if f.code == code] for code in ("native", "transformers")}
    served = sum(map(len, of_code.values()))
    worst = max(f.difference for each in of_code.values() for f in each)
    lines = [
        "# Architectures",
        "",
        f"The causal architectures of transformers {transformers.__version__}, as",
        "`python -m tests.unit.engine.architectures` finds them. It makes a small random",
        "checkpoint of each that would run on transformers' code, serves it in float32 with two",
        "sequences in shared steps, in chunks and decodes, and compares the logits with",
        f"transformers': the largest difference of one is {worst:.1e}. Native families are",
        f"compared by their own tests. Of {len(findings)} architectures, {served} are served.",
    ]
    for title, code in (("Native", "native"), ("On transformers' code", "transformers")):
        names = ", ".join(f"`{each.name}`" for each in of_code[code])
        lines += ["", f"## {title}", f"{len(of_code[code])}: {names}"]
    drafts = ", ".join(f"`{each.name}`" for each in findings if each.code == "draft")
    lines += ["", "## As draft heads", f"`--draft` takes these beside their model: {drafts}"]
    reasons: dict[str, list[str]] = {}
    for each in findings:
        if each.code in ("refused", "wrong"):
            reasons.setdefault(_reason(each), []).append(f"`{each.name}`")
    lines += ["", "## Refused", "| reason | architectures |", "|---|---|"]
    lines += [f"| {reason} | {', '.join(names)} |" for reason, names in sorted(reasons.items())]
    if failed := [f"`{each.name}`" for each in findings if each.code == "failed"]:
        lines += ["", "## Not tried", "No small checkpoint of these was made and served:"]
        lines += [f"{', '.join(failed)}"]
    return "\n".join(lines) + "\n"


def _reason(finding: Finding) -> str:
    return finding.reason.partition("transformers' code: ")[2].rstrip(".") or finding.reason


def main(names: Sequence[str]) -> None:
    """Survey the named architectures, or all, and write the page."""
    signal.signal(signal.SIGPROF, _stop)
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    known = architecture_names()
    findings = []
    for name in names or known:
        findings.append(_found(name, known[name]))
        print(json.dumps(dataclasses.asdict(findings[-1])), flush=True)
    if not names:
        _PAGE.write_text(page_of(findings), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
