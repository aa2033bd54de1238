"""Tiny tokenizers of the kinds that models have, and their checkpoints."""

import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

__all__ = ["byte_fallback", "byte_level", "write_checkpoint"]

CONTEXT = 64
_WORDS = ("def", " the", " a", "re", "turn", " return", "\n\n", "ab", "é", "<|", "|>")


def byte_level(
    specials: tuple[str, ...] = ("<s>", "</s>"), plain: tuple[str, ...] = ()
) -> Tokenizer:
    """Return byte-level BPE, as in GPT-2, Llama 3 and Qwen."""
    vocabulary = {character: index for index, character in enumerate(sorted(_ALPHABET))}
    merges: list[tuple[str, str]] = []
    for word in _WORDS:
        pieces = list(_byte_level_text(word))
        while len(pieces) > 1:
            pair = (pieces[0], pieces[1])
            if pair not in merges:
                merges.append(pair)
                vocabulary.setdefault(pair[0] + pair[1], len(vocabulary))
            pieces[:2] = [pair[0] + pair[1]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in specials]
    )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    return tokenizer


def byte_fallback(specials: tuple[str, ...] = ("<s>", "</s>")) -> Tokenizer:
    """Return BPE with ▁ for spaces and bytes for unknown characters, as in Llama 2."""
    tokens = ["<unk>", *specials, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", *"abcdefghijklmnopqrstuvwxyz(:)", "é", "▁a", "▁d", "▁de", "▁def"]
    merges = [("▁", "a"), ("▁", "d"), ("▁d", "e"), ("▁de", "f")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ("<unk>", *specials)]
    )
    begin = specials[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[begin, "$A"], pair=[begin, "$A", "$B"], special_tokens=[(begin, 1)]
    )
    return tokenizer


def write_checkpoint(
    directory: Path,
    tokenizer: Tokenizer,
    *,
    bos: str | None = "<s>",
    eos: str = "</s>",
    **config: object,
) -> Path:
    """Write the files of a checkpoint that the service reads; return their directory."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": bos, "eos_token": eos, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    model = {"vocab_size": tokenizer.get_vocab_size() + 3, "max_position_embeddings": CONTEXT}
    (directory / "config.json").write_text(json.dumps(model))
    return directory


_ALPHABET = pre_tokenizers.ByteLevel.alphabet()


def _byte_level_text(text: str) -> str:
    [(piece, _)] = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    ).pre_tokenize_str(text)
    return piece
