"""Export of a state file as a Hugging Face checkpoint, compared with transformers.

Every file is written under a temporary name and renamed, so that readers never see a partial one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from model import CausalModel, ModelShape
from tokenizer import END_OF_TEXT, FIM_PAD, IM_END

TOLERANCE = 1e-4
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def model_config(shape: ModelShape, tokenizer: Tokenizer) -> dict[str, object]:
    """Return the content of config.json."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.feed_forward,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": tokenizer.token_to_id(FIM_PAD),
    }


def generation_config(tokenizer: Tokenizer) -> dict[str, object]:
    """Return the content of generation_config.json."""
    end, turn_end = tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(IM_END)
    pad = tokenizer.token_to_id(FIM_PAD)
    return {
        "bos_token_id": end,
        "eos_token_id": [end, turn_end],
        "pad_token_id": pad,
        "do_sample": False,
    }


def write_checkpoint(model: CausalModel, tokenizer_folder: Path, folder: Path) -> None:
    """Write weights, configuration and tokenizer files."""
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    weights = {name: value.bfloat16().contiguous() for name, value in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", model_config(model.model.shape, tokenizer))
    _write_json(folder / "generation_config.json", generation_config(tokenizer))
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer_folder / name, folder / name)


def check_logits(model: CausalModel, folder: Path) -> float:
    """Return the largest difference from transformers' logits, in float32."""
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rounded = CausalModel(model.model.shape)
    rounded.load_state_dict(
        {name: value.bfloat16().float() for name, value in model.state_dict().items()}
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(Path(__file__).read_text(), return_tensors="pt").input_ids[
        :, : model.model.shape.context
    ]
    with torch.no_grad():
        difference = (theirs(ids).logits - rounded.logits(ids)).abs().max().item()
    assert difference < TOLERANCE, f"logits differ by {difference}"
    return float(difference)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--state", type=Path, required=True, help="state file of train.py")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of tokenizer.py")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    arguments = parser.parse_args()
    state = torch.load(arguments.state, map_location="cpu")
    model = CausalModel(ModelShape(**state["shape"]))
    model.load_state_dict(state["model"])
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.out, prefix=".export-") as name:
        staging = Path(name)
        write_checkpoint(model, arguments.tokenizer, staging)
        difference = check_logits(model, staging)
        for path in sorted(staging.iterdir()):
            os.chmod(path, 0o644)
            os.replace(path, arguments.out / path.name)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    progress = state["progress"]
    print(
        f"{parameters:,} parameters, step {progress['step']}, {progress['tokens']:,} tokens, "
        f"logits within {difference:.1e}"
    )


if __name__ == "__main__":
    main()
