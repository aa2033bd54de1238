"""Training of the byte-level BPE tokenizer, and its Hugging Face files.

A newline and the indentation after it are one pre-token, so most Python lines spend one token on
layout.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)

VOCAB_SIZE = 8192
END_OF_TEXT = "<|endoftext|>"
FIM_PREFIX, FIM_SUFFIX, FIM_MIDDLE, FIM_PAD = (
    "<|fim_prefix|>",
    "<|fim_suffix|>",
    "<|fim_middle|>",
    "<|fim_pad|>",
)
REPO_NAME, FILE_SEPARATOR = "<|repo_name|>", "<|file_sep|>"
IM_START, IM_END = "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (
    *(END_OF_TEXT, FIM_PREFIX, FIM_SUFFIX, FIM_MIDDLE, FIM_PAD),
    *(REPO_NAME, FILE_SEPARATOR, IM_START, IM_END),
)
PLAIN_ADDED_TOKENS = ("<tool_call>", "</tool_call>")
CONTEXT = 2048

_PIECES = (
    r"\n[\n ]*"  # newlines with the indentation that follows
    r"|[^\n\p{L}\p{N}]?\p{L}+"  # a word, with one blank or punctuation mark before it
    r"|\p{N}"  # digits one by one
    r"| ?[^\s\p{L}\p{N}]+"  # punctuation
    r"|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """Train VOCAB_SIZE entries; special tokens come first, tool-call tags last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(PLAIN_ADDED_TOKENS),
        special_tokens=[
            AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS
        ],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in PLAIN_ADDED_TOKENS]
    )
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path, chat_template: str) -> None:
    """Write the tokenizer, its configuration, its special tokens and the chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    roles = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": FIM_PAD}
    specials = [token for token in SPECIAL_TOKENS if token not in roles.values()]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        **roles,
        "unk_token": None,
        "additional_special_tokens": specials,
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(token)): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": token in SPECIAL_TOKENS,
            }
            for token in (*SPECIAL_TOKENS, *PLAIN_ADDED_TOKENS)
        },
        "chat_template": chat_template,
    }
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", config)
    _write_json(
        folder / "special_tokens_map.json", {**roles, "additional_special_tokens": specials}
    )
    (folder / "chat_template.jinja").write_text(chat_template)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def corpus_texts(corpus: Path, megabytes: float) -> Iterator[str]:
    """Yield texts of randomly chosen training files, about `megabytes` in all."""
    lines = corpus.read_text().splitlines()
    random.Random(0).shuffle(lines)
    left = megabytes * 1e6
    for line in lines:
        text: str = json.loads(line)["text"]
        yield text
        left -= len(text)
        if left < 0:
            return


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True, help="train.jsonl of corpus.py")
    parser.add_argument(
        "--template", type=Path, default=Path(__file__).with_name("chat_template.jinja")
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the tokenizer files")
    parser.add_argument("--megabytes", type=float, default=60.0, help="how much text to train on")
    arguments = parser.parse_args()
    tokenizer = train_tokenizer(corpus_texts(arguments.corpus, arguments.megabytes))
    write_tokenizer(tokenizer, arguments.out, arguments.template.read_text())


if __name__ == "__main__":
    main()
