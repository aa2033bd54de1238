"""Small random checkpoints that embed or score texts, with a WordPiece tokenizer as BERT has."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import WordPiece
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    PreTrainedTokenizerFast,
)

__all__ = [
    "CONTEXT",
    "LABELS",
    "QUERY_LENGTH",
    "make_classifier",
    "make_colbert",
    "make_embedder",
    "make_scorer",
]

CONTEXT = 64
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


def make_embedder(path: Path) -> Path:
    """Make a checkpoint as sentence-transformers saves it: mean pooling, vectors of length 1."""
    size = _save_tokenizer(path)
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=size, **_SHAPE)).save_pretrained(path)
    modules = [("base.modules.transformer.Transformer", ""), ("models.Pooling", "1_Pooling")]
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
    prompts = {"prompts": {"query": "what is the key ", "passage": "the lock: "}}
    (path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return path


def make_colbert(path: Path, **values: Any) -> Path:
    """Make a checkpoint as PyLate saves it: a projection of each token. values: of its config."""
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
    (path / "1_Dense").mkdir()
    dense = {
        "in_features": 32,
        "out_features": 16,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    (path / "1_Dense/config.json").write_text(json.dumps(dense))
    save_file({"linear.weight": torch.randn(16, 32)}, path / "1_Dense/model.safetensors")
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
