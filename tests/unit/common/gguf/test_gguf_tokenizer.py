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
from sentencepiece import (
    SentencePieceProcessor,
    SentencePieceTrainer,
    sentencepiece_model_pb2,
)
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
from services.common.settings import StartupError
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


UPPER = r"(?:(?!\p{Han})[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}])"
LOWER = r"(?:(?!\p{Han})[\p{Ll}\p{Lm}\p{Lo}\p{M}])"
KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
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
    "kimi-k2": lambda: isolated(KIMI),
    "seed-coder": lambda: isolated(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "bloom": lambda: isolated(r" ?[^(\s|[.,!?…。，、।۔،])]+"),
    "deepseek-coder": lambda: pre_tokenizers.Sequence(
        [
            *(Split(Regex(each), "isolated") for each in (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+")),
            Split(Regex("[一-龥ࠀ-一가-퟿]+"), "isolated"),
            Digits(individual_digits=True),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
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


SERVED = (
    *("default", "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0"),
    *("lfm2", "jina-v5-nano", "deepseek-llm", "deepseek-coder", "deepseek-v3", "youtu", "falcon"),
    *("mpt", "starcoder", "gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es"),
    *("jina-v2-de", "a.x-4.0", "mellum", "modern-bert", "jais-2", "jina-v1-en", "jina-v2-code"),
    *("roberta-bpe", "refact", "command-r", "qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2"),
    *("qwen35", "stablelm2", "olmo", "dbrx", "smaug-bpe", "poro-chat", "glm4", "chatglm-bpe"),
    *("viking", "jais", "tekken", "smollm", "codeshell", "bloom", "gpt3-finnish", "exaone"),
    *("exaone4", "exaone-moe", "minerva-7b", "megrez", "gpt-4o", "llama4", "kanana2", "talkie"),
    *("granite-embed-multi-97m", "tiny_aya", "cohere2moe", "trillion", "granite-docling"),
    *("bailingmoe", "bailingmoe2", "llada-moe", "seed-coder", "hunyuan", "hunyuan-dense"),
    *("hy_v4", "joyai-llm", "kimi-k2", "ufakzeka", "grok-2", "laguna", "minimax-m2"),
    *("solar-open", "mellum2", "minicpm5"),
)
REFUSED = (
    *("spark2_5", "gemma4", "granite-embed-multi-311m", "sarvam-moe", "whitespace", "chameleon"),
    *("superbpe", "afmoe"),
)
"""With SERVED, all names of llama.cpp"""
SAMPLE = "It's 12345 naïve  words,\r\n\n\t中文、かな 한국어 ΑΒγ! don't x²+y³ = ½…   \n"


@pytest.mark.parametrize("name", SERVED)
def test_text_survives_every_pre_tokenizer(tmp_path: Path, name: str) -> None:
    """An expression that is no expression, or drops characters, would fail only with a model."""
    vocabulary = vocabulary_of(tmp_path, 256, lambda writer: write_bytes(writer, name))
    ids = vocabulary.encode(SAMPLE)
    assert "".join(vocabulary.decode(ids, skip_special_tokens=False)) == SAMPLE
    assert len(ids) == len(SAMPLE.encode())


@pytest.mark.parametrize("name", REFUSED)
def test_other_pre_tokenizers_are_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(StartupError, match=f"the pre-tokenizer {name} is not supported"):
        vocabulary_of(tmp_path, 256, lambda writer: write_bytes(writer, name))


@pytest.mark.parametrize("name", ["bert", "rwkv", "plamo2"])
def test_other_tokenizers_are_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(StartupError, match=f"the tokenizer {name} is not supported"):
        vocabulary_of(tmp_path, 256, lambda writer: writer.add_tokenizer_model(name))


def write_bytes(writer: GGUFWriter, pre_tokenizer: str) -> None:
    """Write a vocabulary of the 256 bytes."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(sorted(ByteLevel.alphabet()))
    writer.add_token_merges([])
    writer.add_add_bos_token(False)


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


def test_unigram_ids_equal_those_of_the_original(tmp_path: Path, corpus: Sequence[str]) -> None:
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(corpus[::20]),
        model_writer=model,
        model_type="unigram",
        vocab_size=2000,
        byte_fallback=True,
        character_coverage=0.99,
        normalization_rule_name="nmt_nfkc",
        minloglevel=2,
    )
    original = SentencePieceProcessor(model_proto=model.getvalue())
    proto: Any = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    proto.ParseFromString(model.getvalue())
    size = original.vocab_size()

    def write(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("t5")
        writer.add_token_list([original.id_to_piece(i) for i in range(size)])
        writer.add_token_scores([original.get_score(i) for i in range(size)])
        writer.add_token_types([kind_of(original, i) for i in range(size)])
        writer.add_unk_token_id(original.unk_id())
        writer.add_eos_token_id(original.eos_id())
        writer.add_add_space_prefix(True)
        writer.add_remove_extra_whitespaces(True)
        writer.add_precompiled_charsmap(proto.normalizer_spec.precompiled_charsmap)

    vocabulary = vocabulary_of(tmp_path, size, write)
    texts = corpus[::10]
    expected = [[*ids, original.eos_id()] for ids in original.encode(texts)]
    ours = [vocabulary.encode(text) for text in texts]
    same = sum(a == b for a, b in zip(ours, expected, strict=True))
    assert same > 0.99 * len(texts)  # equal scores round in another way


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
