"""Ids of llama.cpp's test vectors, which the tokenizers of published models made.

The files are not part of this repository. `ggml-vocab-*.gguf` are vocabularies, and `.inp` and
`.out` beside them hold texts and ids. TOKENWIRE_LLAMA_CPP_MODELS names their folder, which is
`models` in llama.cpp's repository, and in the source distribution of `llama-cpp-python` under
`vendor/llama.cpp`.
"""

import json
import os
import unicodedata
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from services.common.gguf.gguf_file import GgufFile
from services.common.gguf.gguf_tokenizer import tokenizer_of

_FOLDER = os.environ.get("TOKENWIRE_LLAMA_CPP_MODELS", "")
_TEXTS = sorted(Path(_FOLDER or os.devnull).glob("ggml-vocab-*.gguf.inp"))
_COMPOSING = {"qwen35"}
"""Pre-tokenizers whose vectors have texts that the model's own tokenizer composes to NFC, and
llama.cpp does not"""


@pytest.mark.skipif(not _TEXTS, reason="TOKENWIRE_LLAMA_CPP_MODELS names no folder of vocabularies")
@pytest.mark.parametrize("texts", _TEXTS, ids=lambda path: path.name.split(".")[0])
def test_ids_equal_the_test_vectors_of_llama_cpp(texts: Path) -> None:
    file = GgufFile(texts.with_suffix(""))
    tokenizer = Tokenizer.from_str(json.dumps(tokenizer_of(file)))
    lines = texts.with_suffix(".out").read_text().splitlines()
    expected = [[int(token) for token in line.split()] for line in lines]
    given = texts.read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")[: len(expected)]
    composes = file.text("tokenizer.ggml.pre", "") in _COMPOSING
    cases = [
        (text, ids)
        for text, ids in zip(given, expected, strict=True)
        if not composes or unicodedata.is_normalized("NFC", text)
    ]
    assert len(cases) > 40
    found = [(text, tokenizer.encode(text, add_special_tokens=False).ids) for text, _ in cases]
    assert found == cases
