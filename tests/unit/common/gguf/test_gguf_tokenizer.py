"""Tokenizers of GGUF files: the original's ids of 10,000 lines, and the words of one text."""

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

from services.common.gguf.pre_tokenizers import PRE_TOKENIZERS
from services.common.model_files.checkpoint import opened_checkpoint
from services.common.settings import StartupError
from services.tokenizer.embedding.pair_template import PairTemplate
from services.tokenizer.text.vocabulary import Vocabulary

ARCHITECTURE = "llama"
BYTES = 257
"""Size of the vocabulary that `write_bytes` writes"""


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
    original.train_from_iterator(corpus[::10], trainer)
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


REFUSED = ("whitespace", "granite-embed-multi-311m", "granite-embed-multi-97m")
"""With PRE_TOKENIZERS, all names of llama.cpp"""
BYTE_LEVEL = [name for name, each in PRE_TOKENIZERS.items() if each.spells_bytes]
SAMPLE = "It's 12345 naïve  words,\r\n\n\t中文、かな 한국어 ΑΒγ! don't x²+y³ = ½…   \n"


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_text_survives_every_pre_tokenizer(tmp_path: Path, name: str) -> None:
    """An expression that is no expression, or drops characters, would fail only with a model."""
    vocabulary = vocabulary_of(tmp_path, BYTES, lambda writer: write_bytes(writer, name))
    ids = vocabulary.encode(SAMPLE)
    assert "".join(vocabulary.decode(ids, skip_special_tokens=False)) == SAMPLE
    assert len(ids) == len(SAMPLE.encode())


@pytest.mark.parametrize("name", ["afmoe", "superbpe", "tiny_aya"])
def test_digits_of_a_long_number_are_counted_within_its_parts(name: str) -> None:
    """A whole long number would take a time that grows with the square of its length."""
    parts = [pre_tokenizers.Split(Regex(each), "isolated") for each in PRE_TOKENIZERS[name].splits]
    cut = pre_tokenizers.Sequence(parts)
    groups = [[len(word) for word, _ in cut.pre_tokenize_str("1" * n)] for n in (100, 1000)]
    assert groups == [[1, *[3] * 33], [*[3] * 300, 1, *[3] * 33]]


@pytest.mark.parametrize(
    ("pre_tokenizer", "says_separator", "between"),
    [
        ("roberta-bpe", None, [1, 1]),
        ("roberta-bpe", False, [1]),
        ("modern-bert", True, [1]),  # whose converter always says so
        ("jina-v2-de", True, [1, 1]),
        ("jina-v2-de", None, [1]),
    ],
)
def test_special_tokens_of_an_encoder_go_around_texts_and_pairs(
    tmp_path: Path, pre_tokenizer: str, says_separator: bool | None, between: list[int]
) -> None:
    def write(writer: GGUFWriter) -> None:
        write_bytes(writer, pre_tokenizer)
        for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_sep_token_id):
            add(int(add != writer.add_bos_token_id))
        writer.add_add_bos_token(True)
        writer.add_add_eos_token(True)
        if says_separator is not None:
            writer.add_add_sep_token(says_separator)

    vocabulary = vocabulary_of(tmp_path, BYTES, write, "bert")
    inner = [vocabulary.encode(text, add_special_tokens=False) for text in "ab"]
    [text, pair] = vocabulary.encode_framed(["a", ("a", "b")])
    assert text.ids == [0, *inner[0], 1]
    assert pair.ids == [0, *inner[0], *between, *inner[1], 1]


@pytest.mark.parametrize("name", REFUSED)
def test_other_pre_tokenizers_are_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(StartupError, match=f"the pre-tokenizer {name} is not supported"):
        vocabulary_of(tmp_path, BYTES, lambda writer: write_bytes(writer, name))


@pytest.mark.parametrize("name", ["none", "rwkv", "plamo2", "whitespace", "hybriddna"])
def test_other_tokenizers_are_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(StartupError, match=f"the tokenizer {name} is not supported"):
        vocabulary_of(tmp_path, 256, lambda writer: writer.add_tokenizer_model(name))


def write_bytes(writer: GGUFWriter, pre_tokenizer: str, *, further: Sequence[str] = ()) -> None:
    """Write a vocabulary of the 256 bytes, the one merge without which it is none, and more."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list([*sorted(ByteLevel.alphabet()), "!!", *further])
    writer.add_token_merges(["! !"])


TEXT = "I'm he'LLo  12345 x 67 e\u0301a 中文かな 한국 ก็ดี\r\n\n  fooBar(), ^_^`\n/\n a       b_c  "
WORDS = {
    "default": (
        "I|'|m| he|'|LLo| | |123|45| x| |67| e|\u0301|a| 中文かな| 한국| ก|็|ด|ี|\r\n\n "
        "| fooBar|(),| |^_^|`|\n|/|\n| a|      | b|_|c|  "
    ),
    "gpt-2": (
        "I|'m| he|'|LLo| | 12345| x| 67| e|\u0301|a| 中文かな| 한국| ก|็|ด|ี|\r\n\n "
        "| fooBar|(),| ^_^`|\n|/|\n| a|      | b|_|c|  "
    ),
    "llama-bpe": (
        "I|'m| he|'LL|o| | |123|45| x| |67| e|\u0301a| 中文かな| 한국| ก|็ด|ี\r\n\n| "
        "| fooBar|(),| ^_^`\n|/\n| a|      | b|_c|  "
    ),
    "jais-2": (
        "I|'m| he|'LL|o| | |123|45| x| |67| e|\u0301a| 中文かな| 한국| ก|็ด|ี\r\n\n| "
        "| fooBar|(),| ^_^`\n|/\n| a|    |  | b|_c|  "
    ),
    "qwen2": (
        "I|'m| he|'LL|o| | |1|2|3|4|5| x| |6|7| e|\u0301a| 中文かな| 한국| ก|็ด|ี\r\n\n| "
        "| fooBar|(),| ^_^`\n|/\n| a|      | b|_c|  "
    ),
    "qwen35": (
        "I|'m| he|'LL|o| | |1|2|3|4|5| x| |6|7| e\u0301a| 中文かな| 한국| ก็ดี|\r\n\n| "
        "| fooBar|(),| ^_^`\n|/\n| a|      | b|_c|  "
    ),
    "seed-coder": (
        "I|'m| he|'LL|o| | |1|2|3|4|5| x| |6|7| e|\u0301a| 中文かな| 한국| ก|็ด|ี|\r\n\n| "
        "| fooBar|(),| ^_^`|\n|/|\n| a|      | b|_c|  "
    ),
    "ufakzeka": (
        "I|'m| he|'LLo| | |1|2|3|4|5| x| |6|7| e|\u0301a| 中文かな| 한국| ก|็ด|ี\r\n\n| "
        "| fooBar|(),| ^_^`\n|/\n| a|      | b|_c|  "
    ),
    "laguna": (
        "I|'m| he|'LL|o| | |1|2|3|4|5| x| |6|7| e|\u0301a| 中文かな| 한국| ก|็ด|ี\r|\n\n| "
        "| fooBar|(),| ^_^`|\n|/|\n| a|      | b|_c|  "
    ),
    "minicpm5": (
        "I|'m| he|'LL|o|  |123|45| x| |67| e|\u0301a| 中文かな| 한국| ก|็ด|ี\r\n\n| "
        "| fooBar|(),| ^_^`\n|/\n| a|      | b|_c|  "
    ),
    "starcoder": (
        "I|'m| he|'|LLo|  |1|2|3|4|5| x| |6|7| e|\u0301|a| 中文かな| 한국| ก|็|ด|ี|\r\n\n "
        "| fooBar|(),| ^_^`|\n|/|\n| a|      | b|_|c|  "
    ),
    "exaone-moe": (
        "I|'m| he|'LL|o| | |1|2|3|4|5| x| |6|7| e\u0301a 中文かな 한국 ก็ดี|\r\n\n| "
        "| fooBar|(),| ^_^`\n|/\n| a|      | b|_c|  "
    ),
    "falcon": (
        "I|'|m| he|'|LLo| | |123|45| x| 67| e|\u0301|a| 中文かな| 한국| ก|็|ด|ี|\r\n\n "
        "| fooBar|(),| |^_^`|\n|/|\n| a|      | b|_|c|  "
    ),
    "bloom": (
        "I'm| he'LLo| | 12345| x| 67| e\u0301a| 中文かな| 한국| ก็ดี|\r\n\n "
        "| fooBar|(),| ^_^`|\n|/|\n| a|      | b_c|  "
    ),
    "viking": (
        "I'm| he'LLo| | |1|2|3|4|5| x| |6|7| e\u0301a| 中文かな| 한국| ก็ดี|\r\n\n "
        "| fooBar|(),| ^_^`|\n|/|\n| a|      | b_c|  "
    ),
    "deepseek-coder": (
        "I|'|m| he|'|LLo|  |1|2|3|4|5| x| |6|7| e|\u0301|a| |中文かな| |한국| |ก|็|ด|ี|\r|\n|\n| "
        "| fooBar|(),| ^|_|^`|\n|/|\n| a|      | b|_|c|  "
    ),
    "deepseek-llm": (
        "I|'|m| he|'|LLo|  |1|2|3|4|5| x| |6|7| e|\u0301|a| |中文かな| |한국| |ก็ดี|\r|\n|\n| "
        "| fooBar|(),| ^_^`|\n|/|\n| a|      | b|_|c|  "
    ),
    "deepseek-v3": (
        "I|'m| he|'LLo|  |123|45| x| |67| e\u0301a| |中文かな| 한국| ก็ดี|\r\n\n| "
        "| fooBar|(),| ^_^`\n|/\n| a|      | b|_c|  "
    ),
    "spark2_5": (
        "I|'m| he|'LLo|  |1|2|3|4|5| x| |6|7| e\u0301a| |中文かな| 한국| ก็ดี|\r|\n|\n| "
        "| fooBar|(),| ^_^`|\n|/|\n| a|      | b|_c|  "
    ),
    "afmoe": (
        "I|'m| he|'LLo|  |12|345| x| |67| e\u0301a| |中文かな| |한국| ก|็|ดี|\r\n\n| "
        "| fooBar|(),| ^_^`\n|/\n| a|      | b|_c|  "
    ),
    "superbpe": (
        "I'm he'LLo  |12|345| x |67| e\u0301a 中文かな 한국 ก็ดี\r\n\n "
        " fooBar(), ^_^`\n/\n a       b_c  "
    ),
    "chameleon": (
        "I|'|m| he|'|LLo|  |1|2|3|4|5| x| |6|7| e|\u0301|a| 中文かな| 한국| ก|็|ด|ี|\r|\n|\n|  "
        "|fooBar|(|)|,| |^|_|^|`|\n|/|\n| a|    |  | b|_|c|  "
    ),
    "tekken": (
        "I|'m| he|'LLo| | |1|2|3|4|5| x| |6|7| e\u0301a| 中文かな| 한국| ก็ดี|\r\n\n| "
        "| foo|Bar|(),| ^_^`\n/\n| a|      | b|_c|  "
    ),
    "gpt-4o": (
        "I'm| he'LL|o| | |123|45| x| |67| e\u0301a| 中文かな| 한국| ก็ดี|\r\n\n| "
        "| foo|Bar|(),| ^_^`\n/\n| a|      | b|_c|  "
    ),
    "tiny_aya": (
        "I'm| he'LL|o|  |12|345| x| |67| e\u0301a| 中文かな| 한국| ก็ดี|\r\n\n| "
        "| foo|Bar|(),| ^_^`\n/\n| a|      | b|_c|  "
    ),
    "youtu": (
        "I'm| he'LL|o| | |1|2|3|4|5| x| |6|7| e\u0301a| |中文かな| |한국| ก็ดี|\r\n\n| "
        "| foo|Bar|(),| ^_^`\n/\n| a|      | b|_c|  "
    ),
    "kimi-k2": (
        "I'm| he'LL|o| | |123|45| x| |67| e\u0301a| |中文|かな| 한국| ก็ดี|\r\n\n| "
        "| foo|Bar|(),| ^_^`\n|/\n| a|      | b|_c|  "
    ),
}
"""Words of TEXT, by hand from the expressions of llama.cpp and of the models' own files"""


@pytest.mark.parametrize("name", WORDS)
def test_text_is_cut_into_the_words_of_the_original(tmp_path: Path, name: str) -> None:
    """Other words have other ids: the model would read a text that it was not trained on."""
    vocabulary_of(tmp_path, BYTES, lambda writer: write_bytes(writer, name))
    with opened_checkpoint(tmp_path / "model.gguf") as directory:
        cutter = Tokenizer.from_file(str(directory / "tokenizer.json")).pre_tokenizer
    words = [TEXT[slice(*span)] for _, span in cutter.pre_tokenize_str(TEXT)]
    assert words == WORDS[name].split("|")


def test_words_of_each_pre_tokenizer_are_known() -> None:
    tried = {PRE_TOKENIZERS[name].splits for name in WORDS}
    assert tried == {PRE_TOKENIZERS[name].splits for name in BYTE_LEVEL}


LLAMA3 = {"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"}
LLAMA3 |= {"jina-v5-nano"}
HAS_BOS = LLAMA3 | {"tekken", "chameleon"}
KEEPS_WORDS = LLAMA3 | {"tekken", "minicpm5", "youtu", "glm4", "glm5"}


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_name_decides_on_whole_words_and_bos(tmp_path: Path, name: str) -> None:
    """A word without merges would be letters, and a prompt would begin without its BOS."""

    def write(writer: GGUFWriter) -> None:
        write_bytes(writer, name, further=["word", "<s>"])
        writer.add_bos_token_id(BYTES + 1)

    vocabulary = vocabulary_of(tmp_path, BYTES + 2, write)
    assert vocabulary.adds_bos == (name in HAS_BOS)
    assert len(vocabulary.encode("word")) - vocabulary.adds_bos == (1 if name in KEEPS_WORDS else 4)


@pytest.mark.parametrize("model", ["gpt2", "gemma4"])
def test_tokenizer_without_merges_is_refused(tmp_path: Path, model: str) -> None:
    """Each text would be its bytes."""

    def write(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model(model)
        writer.add_token_list(sorted(ByteLevel.alphabet()))
        writer.add_token_scores([0.0] * 256)

    with pytest.raises(StartupError, match=r"model\.gguf lacks tokenizer\.ggml\.merges\.$"):
        vocabulary_of(tmp_path, 256, write)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("key", ["token_type", "precompiled_charsmap", "scores"])
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, key: str, value: float) -> None:
    def write(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("t5")
        writer.add_token_list(sorted(ByteLevel.alphabet()))
        writer.add_array(f"tokenizer.ggml.{key}", [value] * 256)

    with pytest.raises(StartupError, match=rf"model\.gguf: tokenizer\.ggml\.{key} must be a list"):
        vocabulary_of(tmp_path, 256, write)


@pytest.mark.parametrize(
    ("model", "pre_tokenizer"), [("gemma4", None), ("gpt2", "gemma4"), ("gpt2", "sarvam-moe")]
)
def test_ids_of_merged_pieces_equal_those_of_the_original(
    tmp_path: Path, corpus: Sequence[str], model: str, pre_tokenizer: str | None
) -> None:
    original = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    original.normalizer = normalizers.Replace(" ", "▁")
    original.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    special = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=2000, special_tokens=special, show_progress=False)
    original.train_from_iterator(corpus[::100], trainer)
    state = json.loads(original.to_str())
    state["added_tokens"] = state["added_tokens"][:4]  # the bytes are no texts of their own
    original = Tokenizer.from_str(json.dumps(state))
    tokens = sorted(original.get_vocab(), key=original.get_vocab().__getitem__)
    kinds = [TokenType.CONTROL] * 4 + [TokenType.BYTE] * 256

    def write(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model(model)
        if pre_tokenizer is not None:
            writer.add_tokenizer_pre(pre_tokenizer)
        writer.add_token_list(tokens)
        writer.add_token_types([*kinds, *[TokenType.NORMAL] * (len(tokens) - len(kinds))])
        writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
        writer.add_bos_token_id(2)
        writer.add_eos_token_id(1)
        writer.add_unk_token_id(3)
        writer.add_add_bos_token(False)

    vocabulary = vocabulary_of(tmp_path, len(tokens), write)
    has_bos = int("gemma4" in (model, pre_tokenizer))  # whatever the file says
    assert vocabulary.adds_bos == bool(has_bos)
    texts = [*corpus[:2000], "a  b\n\n\nc 猫"]
    expected = [encoding.ids for encoding in original.encode_batch_fast(texts)]
    assert [vocabulary.encode(text)[has_bos:] for text in texts] == expected
    assert "".join(vocabulary.decode(vocabulary.encode(texts[-1]))) == texts[-1]


@pytest.mark.parametrize("adds_space", [True, False])
def test_sentencepiece_ids_equal_those_of_the_original(
    tmp_path: Path, corpus: Sequence[str], adds_space: bool
) -> None:
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(corpus[::10]),
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
        sentence_iterator=iter(corpus[::10]),
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
        writer.add_token_list([*(original.id_to_piece(i) for i in range(size)), "[PAD2000]"])
        writer.add_token_scores([*(original.get_score(i) for i in range(size)), -10000.0])
        writer.add_token_types([*(kind_of(original, i) for i in range(size)), TokenType.UNUSED])
        writer.add_eos_token_id(original.eos_id())
        writer.add_add_space_prefix(True)
        writer.add_remove_extra_whitespaces(True)
        writer.add_precompiled_charsmap(proto.normalizer_spec.precompiled_charsmap)

    vocabulary = vocabulary_of(tmp_path, size + 1, write)
    texts = [*corpus[::3], "[PAD2000]"]  # as XLM-R's converter fills the vocabulary
    expected = [[*ids, original.eos_id()] for ids in original.encode(texts)]
    ours = [vocabulary.encode(text) for text in texts]
    same = sum(a == b for a, b in zip(ours, expected, strict=True))
    assert same > 0.99 * len(texts)  # equal scores round in another way
    assert ours[-1] == expected[-1]


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
        write_bytes(writer, "gpt-2")
        writer.add_chat_template(
            [
                {"name": "default", "template": "{{ messages }}"},
                {"name": "tool_use", "template": "{{ tools }}"},
                {"name": "rerank", "template": "{query}|{document}"},
            ]
        )

    vocabulary = vocabulary_of(tmp_path, BYTES, write)
    pairs = {"rerank": "{query}|{document}"}
    others = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    assert vocabulary.chat_templates == others | pairs
    assert PairTemplate.among(vocabulary.chat_templates) == PairTemplate("", "|", "")


def vocabulary_of(
    folder: Path, size: int, write: Callable[[GGUFWriter], Any], architecture: str = ARCHITECTURE
) -> Vocabulary:
    """Return the vocabulary of a GGUF file without layers."""
    path = folder / "model.gguf"
    writer = GGUFWriter(path, architecture)
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
