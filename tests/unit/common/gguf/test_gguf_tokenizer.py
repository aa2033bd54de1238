"""Tokenizers of GGUF files: the ids of the library that made the vocabulary, on 100,000 lines."""

import inspect
import io
import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter, TokenType
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tiktoken_ext import openai_public
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2 import tokenization_qwen2
from transformers.models.qwen3_5 import tokenization_qwen3_5

from services.common.checkpoint import opened_checkpoint
from services.tokenizer.text.vocabulary import Vocabulary

ARCHITECTURE = "llama"


def tiktoken_pattern() -> str:
    """Return the expression of o200k_base, which its function would download a vocabulary for."""
    source = inspect.getsource(openai_public.o200k_base)
    parts = re.findall(r'r"""(.*?)"""', source, re.DOTALL)
    assert len(parts) > 5
    return "|".join(parts)


def isolated(pattern: str) -> PreTokenizer:
    plain = ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([Split(Regex(pattern), "isolated"), plain])


ORIGINALS: dict[str, Callable[[], PreTokenizer]] = {
    "gpt-2": lambda: ByteLevel(add_prefix_space=False),
    "starcoder": lambda: pre_tokenizers.Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    ),
    "glm4": lambda: isolated(TikTokenConverter().pattern),  # type: ignore[no-untyped-call]
    "llama-bpe": lambda: isolated(TikTokenConverter().pattern),  # type: ignore[no-untyped-call]
    "qwen2": lambda: isolated(tokenization_qwen2.PRETOKENIZE_REGEX),
    "qwen35": lambda: isolated(tokenization_qwen3_5.PRETOKENIZE_REGEX),
    "gpt-4o": lambda: isolated(tiktoken_pattern()),
}
"""Pre-tokenizers of the original libraries, by their names in llama.cpp"""


@pytest.mark.parametrize("name", ORIGINALS)
def test_byte_level_ids_equal_those_of_the_original(
    tmp_path: Path, corpus: Sequence[str], name: str
) -> None:
    original = Tokenizer(models.BPE())
    original.pre_tokenizer = ORIGINALS[name]()
    original.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    original.train_from_iterator(corpus[::20], trainer)
    original.add_special_tokens(["<|end|>"])
    original.add_tokens([AddedToken("<tool>", normalized=False)])
    state = json.loads(original.to_str())
    tokens = sorted(original.get_vocab(), key=original.get_vocab().__getitem__)
    kinds = {"<|end|>": TokenType.CONTROL, "<tool>": TokenType.USER_DEFINED}

    def write(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(name)
        writer.add_token_list(tokens)
        writer.add_token_types([kinds.get(token, TokenType.NORMAL) for token in tokens])
        writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
        writer.add_eos_token_id(tokens.index("<|end|>"))
        writer.add_bos_token_id(tokens.index("<|end|>"))
        writer.add_add_bos_token(False)

    vocabulary = vocabulary_of(tmp_path, len(tokens), write)
    texts = [*corpus, "a<|end|><tool>b"]
    if name.startswith("qwen"):
        texts = [unicodedata.normalize("NFC", text) for text in texts]
    expected = [encoding.ids for encoding in original.encode_batch_fast(texts)]
    assert [vocabulary.encode(text) for text in texts] == expected
    assert vocabulary.eos_id == tokens.index("<|end|>")
    sample = "".join(texts[-50:])
    decoded = vocabulary.decode(vocabulary.encode(sample), skip_special_tokens=False)
    assert "".join(decoded) == sample


WORDS = {
    "deepseek-llm": [
        *("Hello", ",", " world", "!", " ", " x", "=", "1", "2", "3", "4", "5", ";", "\n", "\n"),
        *(
            " ",
            " '",
            "don",
            "'",
            "t",
            "'",
            " ",
            "猫はかわいい",
            " ",
            "안녕",
            " foo",
            "_",
            "bar",
            "  ",
        ),
    ],
    "deepseek-v3": [
        *("Hello", ",", " world", "!", " ", " x", "=", "123", "45", ";\n\n"),
        *(" ", " '", "don", "'t", "'", " ", "猫はかわいい", " 안녕", " foo", "_bar", "  "),
    ],
}
"""Words of one text, by the expressions of DeepSeek's own files: no library has them"""


@pytest.mark.parametrize("name", WORDS)
def test_text_is_cut_into_the_words_of_deepseek(tmp_path: Path, name: str) -> None:
    """Digits, Chinese and Japanese are cut before the words of other scripts."""
    text = "".join(WORDS[name])

    def write(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(name)
        writer.add_token_list(sorted(ByteLevel.alphabet()))
        writer.add_token_merges([])

    vocabulary_of(tmp_path, 256, write)
    with opened_checkpoint(tmp_path / "model.gguf") as directory:
        cutter = Tokenizer.from_file(str(directory / "tokenizer.json")).pre_tokenizer
    assert [text[slice(*span)] for _, span in cutter.pre_tokenize_str(text)] == WORDS[name]


def test_gemma4_ids_equal_those_of_the_original(tmp_path: Path, corpus: Sequence[str]) -> None:
    original = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    original.normalizer = normalizers.Replace(" ", "▁")
    original.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    special = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=2000, special_tokens=special, show_progress=False)
    original.train_from_iterator(corpus[::200], trainer)
    state = json.loads(original.to_str())
    state["added_tokens"] = state["added_tokens"][:4]  # the bytes are no texts of their own
    original = Tokenizer.from_str(json.dumps(state))
    tokens = sorted(original.get_vocab(), key=original.get_vocab().__getitem__)
    kinds = [TokenType.CONTROL] * 4 + [TokenType.BYTE] * 256

    def write(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("gemma4")
        writer.add_token_list(tokens)
        writer.add_token_scores([-1000.0] * len(tokens))
        writer.add_token_types([*kinds, *[TokenType.NORMAL] * (len(tokens) - len(kinds))])
        writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
        writer.add_bos_token_id(2)
        writer.add_eos_token_id(1)
        writer.add_unk_token_id(3)
        writer.add_add_space_prefix(False)

    vocabulary = vocabulary_of(tmp_path, len(tokens), write)
    assert vocabulary.adds_bos
    texts = [*corpus[:2000], "a  b\n\n\nc 猫"]
    expected = [encoding.ids for encoding in original.encode_batch_fast(texts)]
    assert [vocabulary.encode(text)[1:] for text in texts] == expected
    assert "".join(vocabulary.decode(vocabulary.encode(texts[-1]))) == texts[-1]


@pytest.mark.parametrize("adds_space", [True, False])
def test_sentencepiece_ids_equal_those_of_the_original(
    tmp_path: Path, corpus: Sequence[str], adds_space: bool
) -> None:
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(corpus[::20]),
        model_writer=model,
        model_type="bpe",
        vocab_size=2000,
        byte_fallback=True,
        character_coverage=0.99,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=adds_space,
        user_defined_symbols=["<tool>"],
        minloglevel=2,
    )
    original = SentencePieceProcessor(model_proto=model.getvalue())
    size = original.vocab_size()

    def write(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list([original.id_to_piece(i) for i in range(size)])
        writer.add_token_scores([original.get_score(i) for i in range(size)])
        writer.add_token_types([kind_of(original, i) for i in range(size)])
        writer.add_bos_token_id(original.bos_id())
        writer.add_eos_token_id(original.eos_id())
        writer.add_unk_token_id(original.unk_id())
        writer.add_add_space_prefix(adds_space)

    vocabulary = vocabulary_of(tmp_path, size, write)
    assert vocabulary.adds_bos
    expected = original.encode(list(corpus))
    assert [vocabulary.encode(text)[1:] for text in corpus] == expected
    for text in corpus[-50:]:
        decoded = "".join(vocabulary.decode(vocabulary.encode(text)))
        assert decoded == original.decode(original.encode(text))


def kind_of(original: SentencePieceProcessor, token: int) -> TokenType:
    if original.is_unknown(token):
        return TokenType.UNKNOWN
    if original.is_control(token):
        return TokenType.CONTROL
    if original.is_byte(token):
        return TokenType.BYTE
    is_user_defined = original.id_to_piece(token) == "<tool>"
    return TokenType.USER_DEFINED if is_user_defined else TokenType.NORMAL


def test_chat_templates_come_from_the_file(tmp_path: Path) -> None:
    def write(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(sorted(ByteLevel.alphabet()))
        writer.add_token_merges([])
        writer.add_chat_template(
            [
                {"name": "default", "template": "{{ messages }}"},
                {"name": "tool_use", "template": "{{ tools }}"},
            ]
        )

    vocabulary = vocabulary_of(tmp_path, 256, write)
    assert vocabulary.chat_templates == {"default": "{{ messages }}", "tool_use": "{{ tools }}"}


def vocabulary_of(folder: Path, size: int, write: Callable[[GGUFWriter], Any]) -> Vocabulary:
    """Return the vocabulary of a GGUF file without layers."""
    path = folder / "model.gguf"
    writer = GGUFWriter(path, ARCHITECTURE)
    writer.add_context_length(64)
    writer.add_embedding_length(2)
    writer.add_block_count(1)
    writer.add_feed_forward_length(2)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    write(writer)
    writer.add_tensor("token_embd.weight", np.zeros((size, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with opened_checkpoint(path) as directory:
        return Vocabulary(directory)
