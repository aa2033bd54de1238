"""Pre-tokenizers of llama.cpp, which cut a text into the words that BPE merges.

Source: llama-vocab.cpp of llama.cpp. Where it quotes the expression of a model's own tokenizer.json
beside a simpler one, the model's own is used.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from services.common.tokenizer_files.definition import (
    CONTRACTIONS,
    GPT2,
    GPT4O,
    LLAMA3,
    NUMBER,
    QWEN2,
    QWEN35,
    REST,
    TEKKEN,
    WORDS,
)

__all__ = ["PRE_TOKENIZERS", "PreTokenizer"]


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """A pre-tokenizer, with the properties that llama.cpp ties to its name."""

    splits: tuple[str, ...]
    """Regular expressions; each cuts the parts that the one before it has left"""
    keeps_words: bool = False
    """True if a word that is a token needs no merges"""
    has_bos: bool = False
    """True if prompts begin with BOS, unless the file says otherwise"""
    needs_bos: bool = False
    """True if prompts begin with BOS, whatever the file says: early files of Gemma 4 deny it"""
    separates: bool = False
    """True if SEP goes before the second text of a pair, unless the file says otherwise"""
    composes: bool = False
    """True if texts are normalised to NFC first"""
    spells_bytes: bool = True
    """True if tokens are bytes in GPT-2's letters. Otherwise they are sentencepiece's texts, with ▁
    for a space"""


_UP_TO_THREE_DIGITS = r"\p{N}{1,3}"
_THREE_DIGITS = "[0-9][0-9][0-9]"
_HAN_AND_KANA = "[一-龥぀-ゟ゠-ヿ]+"
_EAST_ASIAN = "[一-龥ࠀ-一가-퟿]+"
_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕ"
    "ἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌ\u1fd0-\u1fd3\u1fd6-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭ"
    "Ꚁ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
"""Letters with case that DeepSeek's own file lists"""
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_DEEPSEEK_WORDS = (
    rf"{_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    r"| ?[\p{P}\p{S}]+"
)
_DEEPSEEK3 = rf"{_DEEPSEEK_WORDS}[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPARK = rf"{_DEEPSEEK_WORDS}|[\r\n]|\s+(?!\S)|\s+"
# An expression that counts digits from the right reads the rest of a number at each of its digits.
# So a longer number is cut first, and its digits are counted within each part. The length is a
# multiple of three, so that the parts but the last one have no group of one or two digits.
_NUMBER_PART = r"\p{N}{1,300}"
_LONG_NUMBER_PART = r"\d{300}(?=\d)"
_THREES_FROM_THE_RIGHT = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_ASIAN_SCRIPTS = (
    "[一-鿿㐀-䶿豈-\ufaff\u3040-ゟ゠-ヿ･-ﾟ⼀-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7afᄀ-ᇿ]+"
)
_CHAMELEON = (
    *("<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )"),
    *(NUMBER, r"[\p{P}!-/:-@\[-`{-~]"),
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{CONTRACTIONS}?|{_UP_TO_THREE_DIGITS}|{REST}"
)
_RUNS = "|".join(rf"\s{{{count}}}(?!\S)" for count in ("512", "256", "128", "64", "32", "16"))
_JAIS2 = (
    rf"{CONTRACTIONS}|{WORDS}|{_UP_TO_THREE_DIGITS}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
    rf"|{_RUNS}|\s{{8}}(?!\S)|\s{{4}}(?!\S)|\s{{1,2}}(?!\S)|\s"
)
_SEED_CODER = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_EXAONE_EXPERTS = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_YOUTU = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+"
_LLAMA3 = PreTokenizer((LLAMA3,), keeps_words=True, has_bos=True)
_QWEN2 = PreTokenizer((QWEN2,))
_GPT2 = PreTokenizer((GPT2,))
_DIGITS_AND_GPT2 = PreTokenizer((NUMBER, GPT2))
_GPT4O = PreTokenizer((GPT4O,))
_SENTENCEPIECE = PreTokenizer((), spells_bytes=False)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", _THREE_DIGITS)),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion"), _GPT2),
    **dict.fromkeys(("gigachat", "a.x-4.0", "mellum", "exaone4", "granite-docling"), _GPT2),
    **dict.fromkeys(("jina-es", "jina-de", "jina-v2-es", "jina-v2-de"), _GPT2),
    **dict.fromkeys(("jina-v1-en", "jina-v2-code", "roberta-bpe"), replace(_GPT2, separates=True)),
    "modern-bert": replace(_GPT2, composes=True),
    "jina-v5-nano": _LLAMA3,
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1"), _LLAMA3),
    **dict.fromkeys(("pixtral", "midm-2.0", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), PreTokenizer((LLAMA3,))),
    **dict.fromkeys(("glm4", "glm5"), PreTokenizer((LLAMA3,), keeps_words=True)),
    "jais-2": PreTokenizer((_JAIS2,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), replace(_QWEN2, composes=True)),
    **dict.fromkeys(("kormo", "f2llmv2", "stablelm2", "megrez", "hunyuan"), _QWEN2),
    **dict.fromkeys(("solar-open", "grok-2"), _QWEN2),
    # these have another expression that cuts the same words
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _QWEN2),
    "qwen35": PreTokenizer((QWEN35,), composes=True),
    "seed-coder": PreTokenizer((_SEED_CODER,)),
    "ufakzeka": PreTokenizer((rf"{WORDS}|\p{{N}}|{REST}",)),
    "laguna": PreTokenizer((r"[^\n]+|\n+", QWEN2)),
    "minicpm5": PreTokenizer(
        (_UP_TO_THREE_DIGITS, rf"{CONTRACTIONS}|{WORDS}|\p{{N}}+|{REST}"), keeps_words=True
    ),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), _DIGITS_AND_GPT2),
    **dict.fromkeys(("codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS_AND_GPT2),
    "exaone-moe": PreTokenizer((_EXAONE_EXPERTS,)),
    "falcon": PreTokenizer((r"[\p{P}$+<=>^~|`]+", GPT2, _THREE_DIGITS)),
    **dict.fromkeys(("bloom", "gpt3-finnish", "poro-chat"), PreTokenizer((_BLOOM,))),
    "viking": PreTokenizer((_BLOOM, NUMBER)),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, NUMBER)),
    "deepseek-llm": PreTokenizer(
        (
            *(r"[\r\n]", rf"\s?[{_CASED}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+"),
            # llama.cpp keeps numbers whole, but DeepSeek's own file takes each digit alone
            *(r"\s+$", _EAST_ASIAN, NUMBER),
        )
    ),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"),
        PreTokenizer((_UP_TO_THREE_DIGITS, _HAN_AND_KANA, _DEEPSEEK3)),
    ),
    "spark2_5": PreTokenizer((_UP_TO_THREE_DIGITS, _HAN_AND_KANA, _SPARK, NUMBER)),
    "afmoe": PreTokenizer((_NUMBER_PART, _THREES_FROM_THE_RIGHT, _ASIAN_SCRIPTS, _DEEPSEEK3)),
    "superbpe": PreTokenizer((_NUMBER_PART, r"(?=(\d{3})+(?!\d))")),
    "chameleon": PreTokenizer((*_CHAMELEON, GPT2), has_bos=True),
    "tekken": PreTokenizer((TEKKEN,), keeps_words=True, has_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O),
    **dict.fromkeys(
        ("tiny_aya", "cohere2moe"),
        PreTokenizer((_LONG_NUMBER_PART, r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O)),
    ),
    "youtu": PreTokenizer((_YOUTU, GPT4O.replace(r"\p{N}{1,3}", r"\p{N}")), keeps_words=True),
    "kimi-k2": PreTokenizer((_KIMI,)),
    "gemma4": replace(_SENTENCEPIECE, needs_bos=True),
    "sarvam-moe": _SENTENCEPIECE,
}
"""Pre-tokenizers by their names in llama.cpp"""
