"""Tokenizers without tokenizer.json: the ids of the library that made them, on 10,000 lines."""

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tiktoken import Encoding
from tokenizers import Tokenizer, models, trainers
from tokenizers.pre_tokenizers import ByteLevel

from services.common.model_files.checkpoint import opened_checkpoint
from services.common.settings import StartupError
from services.common.tokenizer_files.definition import LLAMA3, QWEN2, TEKKEN, byte_texts
from services.tokenizer.text.vocabulary import Vocabulary


def vocabulary_of(folder: Path) -> Vocabulary:
    with opened_checkpoint(folder) as directory:
        return Vocabulary(directory)


def text_of(vocabulary: Vocabulary, ids: Sequence[int]) -> str:
    return "".join(vocabulary.decode(ids))


def has_ordered_marks(text: str) -> bool:
    return "".join(normalize("NFKD", each) for each in text) == normalize("NFKD", text)


def sentencepiece_model(corpus: Sequence[str], **options: Any) -> bytes:
    model = io.BytesIO()
    settings: dict[str, Any] = {
        "model_type": "bpe",
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "byte_fallback": True,
        "character_coverage": 0.99,
    }
    SentencePieceTrainer.train(
        sentence_iterator=iter(corpus[::10]),
        model_writer=model,
        vocab_size=2000,
        minloglevel=2,
        **settings | options,
    )
    return model.getvalue()


def test_sentencepiece_ids_equal_the_originals(tmp_path: Path, corpus: Sequence[str]) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(corpus))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|user|>": 2000}))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    original = SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    vocabulary = vocabulary_of(tmp_path)
    assert [vocabulary.encode(text)[1:] for text in corpus] == original.encode(list(corpus))
    assert vocabulary.adds_bos
    assert (vocabulary.bos_id, vocabulary.eos_id) == (original.bos_id(), original.eos_id())
    assert vocabulary.encode("a<|user|>b", add_special_tokens=False).count(2000) == 1
    assert vocabulary.chat_template == "{{ messages }}"


def ranks_of(corpus: Sequence[str]) -> list[bytes]:
    """Return tokens of bytes, each after those that it is merged from."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    trained.train_from_iterator(corpus[::10], trainer)
    letters = {
        letter: byte for byte, letter in enumerate(byte_texts(bytes([i]) for i in range(256)))
    }
    tokens = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    spelled = [bytes(letters[letter] for letter in token) for token in tokens]
    return sorted(spelled[:256]) + spelled[256:]


@pytest.mark.parametrize(
    ("name", "pattern"), [("tokenizer.model", LLAMA3), ("qwen.tiktoken", QWEN2)]
)
def test_tiktoken_ids_equal_the_originals(
    tmp_path: Path, corpus: Sequence[str], name: str, pattern: str
) -> None:
    ranks = ranks_of(corpus)
    lines = (b"%s %d" % (base64.b64encode(token), rank) for rank, token in enumerate(ranks))
    (tmp_path / name).write_bytes(b"\n".join(lines))
    config = {
        "added_tokens_decoder": {"2000": {"content": "<|end|>", "special": True}},
        "eos_token": "<|end|>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    original = Encoding(
        "test",
        pat_str=pattern,
        mergeable_ranks={token: rank for rank, token in enumerate(ranks)},
        special_tokens={"<|end|>": 2000},
    )
    vocabulary = vocabulary_of(tmp_path)
    expected = original.encode_ordinary_batch(list(corpus))
    assert [vocabulary.encode(text) for text in corpus] == expected
    assert vocabulary.encode("a<|end|>")[-1] == vocabulary.eos_id == 2000


def test_tekken_ids_equal_the_originals(tmp_path: Path, corpus: Sequence[str]) -> None:
    ranks = ranks_of(corpus)
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>"]
    content = {
        "config": {
            "pattern": TEKKEN,
            "num_vocab_tokens": len(ranks),
            "default_vocab_size": len(ranks) + 10,
            "default_num_special_tokens": 10,
            "version": "v7",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(ranks)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": text, "is_control": True}
            for rank, text in enumerate(special)
        ],
    }
    (tmp_path / "tekken.json").write_text(json.dumps(content))
    original = Tekkenizer.from_file(tmp_path / "tekken.json")
    vocabulary = vocabulary_of(tmp_path)
    expected = [original.encode(text, bos=True, eos=False) for text in corpus]
    assert [vocabulary.encode(text) for text in corpus] == expected
    assert vocabulary.encode("[INST]", add_special_tokens=False) == [3]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tokenizer.model", b"\xff\xff\xff", "no model of sentencepiece"),
        ("tekken.json", b"{}", "damaged"),
        ("qwen.tiktoken", b"YQ== 0\nYg== 2", "its ranks"),
        ("qwen.tiktoken", b"YQ== 0\nYg== 1", "no special tokens"),
    ],
)
def test_damaged_file_is_refused_in_one_sentence(
    tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(StartupError, match=reason) as refused:
        vocabulary_of(tmp_path)
    assert name in str(refused.value)


@pytest.mark.parametrize(
    "options",
    [
        {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
        {"normalization_rule_name": "nmt_nfkc", "byte_fallback": False},
        {"normalization_rule_name": "nfkc", "split_by_whitespace": False},
        {"normalization_rule_name": "nfkc_cf", "add_dummy_prefix": False, "split_digits": True},
        {
            "normalization_rule_name": "nmt_nfkc_cf",
            "user_defined_symbols": ["\n", "\t", "Ab", "  ", "►"],
            "control_symbols": ["<sep>"],
        },
        {
            "normalization_rule_name": "nfkc",
            "add_dummy_prefix": False,
            "remove_extra_whitespaces": True,
        },
        {"remove_extra_whitespaces": True, "user_defined_symbols": "\n"},
        {},
    ],
    ids=str,
)
def test_unigram_ids_equal_the_originals(
    tmp_path: Path, corpus: Sequence[str], options: dict[str, Any]
) -> None:
    """Except for marks in another order than Unicode's, and for the choice among equal scores."""
    content = sentencepiece_model(corpus, model_type="unigram", **options)
    (tmp_path / "tokenizer.model").write_bytes(content)
    original = SentencePieceProcessor(model_proto=content)
    vocabulary = vocabulary_of(tmp_path)
    ways = ["\r\n", "▁ a", "e\u0301 Å 한국", "ｅ\u0302\u0301", "<0x0A>", "Ab  cAbd\n", "", "  "]
    texts = [*filter(has_ordered_marks, corpus[::8]), *ways]
    others = 0
    for text, expected in zip(texts, original.encode(texts), strict=True):
        found = vocabulary.encode(text)[1:]
        assert vocabulary.encode_plain(text) == found
        if found != expected:
            others += 1
            scores = [sum(map(original.get_score, ids)) for ids in (found, expected)]
            assert scores[0] == pytest.approx(scores[1], rel=1e-6), (text, found, expected)
            assert text_of(vocabulary, found) == text_of(vocabulary, expected)
    assert others < len(texts) / 50
    for text in texts[: -len(ways) : 5]:
        # sentencepiece writes unknown characters as " ⁇ "
        if original.unk_id() not in (ids := original.encode(text)):
            assert text_of(vocabulary, ids) == original.decode(ids)


def test_symbol_of_users_stays_beside_the_text(tmp_path: Path, corpus: Sequence[str]) -> None:
    symbols = ["<user>", "[bot]"]
    content = sentencepiece_model(corpus, model_type="unigram", user_defined_symbols=symbols)
    (tmp_path / "tokenizer.model").write_bytes(content)
    original = SentencePieceProcessor(model_proto=content)
    vocabulary = vocabulary_of(tmp_path)
    for text in ("print(1)<user>print(2)", "a <user> b[bot][bot] c"):
        assert vocabulary.encode(text)[1:] == original.encode(text)


def test_other_kinds_of_sentencepiece_are_refused(tmp_path: Path, corpus: Sequence[str]) -> None:
    rules = tmp_path / "rules.tsv"
    rules.write_text("41\t42\n")
    unigram = {"model_type": "unigram"}
    for options, reason in (
        ({"model_type": "char"}, "no BPE and no Unigram"),
        ({"normalization_rule_name": "nmt_nfkc"}, "only identity is read"),
        (unigram | {"normalization_rule_tsv": str(rules)}, "user_defined"),
        (
            unigram
            | {
                "normalization_rule_name": "nfkc_cf",
                "user_defined_symbols": [f"A{'x' * count}" for count in range(30)],
            },
            "at most 256",
        ),
        (unigram | {"treat_whitespace_as_suffix": True}, "no space before them"),
    ):
        (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(corpus, **options))
        with pytest.raises(StartupError, match=reason):
            vocabulary_of(tmp_path)
