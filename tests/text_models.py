"""Small random checkpoints that embed or score texts, with a WordPiece tokenizer as BERT has."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import WordPiece
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    EuroBertConfig,
    EuroBertModel,
    JinaEmbeddingsV3Config,
    JinaEmbeddingsV3Model,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3Model,
    XLMRobertaConfig,
    XLMRobertaModel,
)

__all__ = [
    "CONTEXT",
    "JINA_TASKS",
    "LABELS",
    "QUERY_LENGTH",
    "RANK",
    "make_bge_m3",
    "make_classifier",
    "make_colbert",
    "make_embedder",
    "make_jina_v3",
    "make_jina_v5",
    "make_jina_v5_nano",
    "make_scorer",
    "make_splade",
]

CONTEXT = 64
JINA_TASKS = ("retrieval.query", "retrieval.passage", "separation")
RANK = 4
"""Rank of the adapters of `make_jina_v3`, whose factor is 3 / RANK"""
LABELS = ("calm", "glad", "sad")
QUERY_LENGTH = 12
"""Tokens of a query of `make_colbert`"""
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_WORDS = ("a", "lock", "mutex", "is", "what", "fruit", "the", "key", "##s", "##es", "?", ".", ",")
_SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
}


def make_embedder(path: Path, width: int | None = None) -> Path:
    """Make a checkpoint as sentence-transformers saves it: mean pooling, vectors of length 1.

    width: numbers of a vector, by a linear layer behind the pooling; None = there is no such layer.
    """
    size = _save_tokenizer(path)
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=size, **_SHAPE)).save_pretrained(path)
    modules = [("base.modules.transformer.Transformer", ""), ("models.Pooling", "1_Pooling")]
    if width is not None:
        modules.append(("models.Dense", "3_Dense"))
    modules.append(("models.Normalize", "2_Normalize"))
    listed = [
        {"idx": index, "name": str(index), "path": folder, "type": f"sentence_transformers.{kind}"}
        for index, (kind, folder) in enumerate(modules)
    ]
    (path / "modules.json").write_text(json.dumps(listed))
    pooling = {
        "word_embedding_dimension": 32,
        "pooling_mode_mean_tokens": True,
        "include_prompt": False,
    }
    for folder, config in (("1_Pooling", pooling), ("2_Normalize", {})):
        (path / folder).mkdir()
        (path / folder / "config.json").write_text(json.dumps(config))
    if width is not None:
        _save_dense(path / "3_Dense", width)
    prompts = {"prompts": {"query": "what is the key ", "passage": "the lock: "}}
    (path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return path


def make_colbert(path: Path, width: int = 16, **values: Any) -> Path:
    """Make a checkpoint as PyLate saves it: a projection of each token.

    width: numbers of a token's vector; values: of its config.
    """
    size = _save_tokenizer(path, ("[Q] ", "[D] "))
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=size, **_SHAPE)).save_pretrained(path)
    modules = {
        "": "sentence_transformers.models.Transformer",
        "1_Dense": "pylate.models.Dense.Dense",
    }
    listed = [
        {"idx": index, "name": str(index), "path": folder, "type": kind}
        for index, (folder, kind) in enumerate(modules.items())
    ]
    (path / "modules.json").write_text(json.dumps(listed))
    _save_dense(path / "1_Dense", width)
    config = {
        "model_type": "ColBERT",
        "query_prefix": "[Q] ",
        "document_prefix": "[D] ",
        "query_length": QUERY_LENGTH,
        "document_length": 20,
        "attend_to_expansion_tokens": False,
        "skiplist_words": ["?", "."],
        "do_query_expansion": True,
        **values,
    }
    (path / "config_sentence_transformers.json").write_text(json.dumps(config))
    return path


def make_bge_m3(path: Path) -> Path:
    """Make a checkpoint with heads of single tokens beside the encoder."""
    size = _save_tokenizer(path)
    torch.manual_seed(0)
    ends: dict[str, Any] = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    XLMRobertaModel(XLMRobertaConfig(vocab_size=size, **_SHAPE, **ends)).save_pretrained(path)
    tokens = json.loads((path / "tokenizer_config.json").read_text())
    tokens |= {"bos_token": "[CLS]", "eos_token": "[SEP]"}
    (path / "tokenizer_config.json").write_text(json.dumps(tokens))
    for name, outputs in (("colbert", 24), ("sparse", 1)):
        torch.save(torch.nn.Linear(32, outputs).state_dict(), path / f"{name}_linear.pt")
    return path


def make_jina_v3(path: Path) -> Any:
    """Make a checkpoint as Jina's own code saves it, with the adapters of JINA_TASKS.

    Returns transformers' model of its weights, without adapters.
    """
    size = _save_tokenizer(path)
    torch.manual_seed(0)
    shape: dict[str, Any] = {**_SHAPE, "vocab_size": size, "type_vocab_size": 1, "pad_token_id": 0}
    model: Any = JinaEmbeddingsV3Model(JinaEmbeddingsV3Config(**shape))
    model.eval()
    model.save_pretrained(path)
    tensors = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        layer = f"roberta.{name.removesuffix('.weight')}.parametrizations.weight"
        if tensor.dim() == 1:
            tensors[f"roberta.{name}"] = tensor
            continue
        outputs, inputs = tensor.shape
        tensors[f"{layer}.original"] = tensor
        tensors[f"{layer}.0.lora_A"] = 0.3 * torch.randn(len(JINA_TASKS), RANK, inputs)
        tensors[f"{layer}.0.lora_B"] = 0.3 * torch.randn(len(JINA_TASKS), outputs, RANK)
        if "embeddings." in name:
            tensors[f"{layer}.0.lora_A"] = 0.3 * torch.randn(len(JINA_TASKS), outputs, RANK)
            tensors[f"{layer}.0.lora_B"] = 0.3 * torch.randn(len(JINA_TASKS), RANK, inputs)
    save_file(tensors, path / "model.safetensors")
    config = {
        **shape,
        "architectures": ["XLMRobertaModel"],
        "layer_norm_eps": model.config.layer_norm_eps,
        "lora_adaptations": [*JINA_TASKS],
        "lora_alpha": 3,
        "lora_rank": RANK,
        "model_type": "xlm-roberta",
        "position_embedding_type": "rotary",
        "rotary_emb_base": 20000.0,
        "task_instructions": {"retrieval.query": "what is the key ", "separation": ""},
    }
    (path / "config.json").write_text(json.dumps(config))
    return model


def make_jina_v5(path: Path) -> Any:
    """Make a checkpoint of text-small: Qwen 3, and an adapter of each of JINA_TASKS.

    Returns transformers' model of its weights, without adapters.
    """
    size = _save_tokenizer(path)
    torch.manual_seed(0)
    config = Qwen3Config(**_SHAPE, vocab_size=size, num_key_value_heads=1, head_dim=16)
    return _save_jina_v5(path, Qwen3Model(config), {})


def make_jina_v5_nano(path: Path) -> Any:
    """Make a checkpoint of text-nano: EuroBERT, and an adapter of each of JINA_TASKS.

    Returns transformers' model of its weights, without adapters.
    """
    size = _save_tokenizer(path)
    torch.manual_seed(0)
    config = EuroBertConfig(**_SHAPE, vocab_size=size, num_key_value_heads=1, pad_token_id=0)
    return _save_jina_v5(path, EuroBertModel(config), {"is_decoder": False})


def _save_jina_v5(path: Path, model: Any, further: Mapping[str, Any]) -> Any:
    """Save a model with a directory for the adapter of each of JINA_TASKS, and return it.

    further: keys of config.json.
    """
    model.eval()
    model.save_pretrained(path)
    values = json.loads((path / "config.json").read_text()) | {
        "architectures": ["JinaEmbeddingsV5Model"],
        "model_type": "jina_embeddings_v5",
        "task_names": [*JINA_TASKS],
        **further,
    }
    (path / "config.json").write_text(json.dumps(values))
    listed = [{"idx": 0, "name": "0", "path": "", "type": "custom_st.Transformer"}]
    (path / "modules.json").write_text(json.dumps(listed))
    for task in JINA_TASKS:
        folder = path / "adapters" / task
        folder.mkdir(parents=True)
        described = {"peft_type": "LORA", "r": RANK, "lora_alpha": 3, "target_modules": ["q_proj"]}
        (folder / "adapter_config.json").write_text(json.dumps(described))
        tensors = {}
        for name, tensor in model.state_dict().items():
            if name.endswith("_proj.weight"):
                layer = f"base_model.model.{name.removesuffix('.weight')}"
                outputs, inputs = tensor.shape
                tensors[f"{layer}.lora_A.weight"] = 0.3 * torch.randn(RANK, inputs)
                tensors[f"{layer}.lora_B.weight"] = 0.3 * torch.randn(outputs, RANK)
        save_file(tensors, folder / "adapter_model.safetensors")
    return model


def make_splade(path: Path) -> Path:
    """Make a checkpoint as sentence-transformers saves it: weights of the vocabulary."""
    base = path.with_name(f"{path.name}-base")
    size = _save_tokenizer(base)
    torch.manual_seed(0)
    BertForMaskedLM(BertConfig(vocab_size=size, **_SHAPE)).save_pretrained(base)
    modules = [Transformer(str(base), transformer_task="fill-mask"), SpladePooling("max")]
    SparseEncoder(modules=modules, device="cpu").save(str(path))
    return path


def make_scorer(path: Path) -> Path:
    """Make a cross-encoder."""
    size = _save_tokenizer(path)
    torch.manual_seed(0)
    config = BertConfig(vocab_size=size, **_SHAPE, num_labels=1)  # type: ignore[call-arg]
    BertForSequenceClassification(config).save_pretrained(path)
    return path


def make_classifier(path: Path) -> Path:
    """Make a checkpoint that sorts texts into LABELS."""
    size = _save_tokenizer(path)
    torch.manual_seed(0)
    names: dict[str, Any] = {"id2label": dict(enumerate(LABELS))}
    config = BertConfig(vocab_size=size, **_SHAPE, **names)
    BertForSequenceClassification(config).save_pretrained(path)
    template = "{% for each in messages %}{{ each.content }} {% endfor %}"
    (path / "chat_template.jinja").write_text(template)
    return path


def _save_dense(path: Path, width: int) -> None:
    """Save a linear layer of `width` outputs."""
    path.mkdir()
    config = {
        "in_features": _SHAPE["hidden_size"],
        "out_features": width,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    (path / "config.json").write_text(json.dumps(config))
    weight = torch.randn(width, _SHAPE["hidden_size"])
    save_file({"linear.weight": weight}, path / "model.safetensors")


def _save_tokenizer(path: Path, added: Sequence[str] = ()) -> int:
    """Save a tokenizer with tokens of its own; return the number of its ids."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    texts = dict.fromkeys((*_SPECIAL, *_WORDS, *letters, *(f"##{each}" for each in letters)))
    vocabulary = {text: index for index, text in enumerate(texts)}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=CONTEXT,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
    fast.add_tokens(list(added))
    fast.save_pretrained(path)
    return len(fast)
