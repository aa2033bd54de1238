"""Encoders of GGUF files: their keys of config.json, and the modules behind them."""

from services.common.gguf.gguf_file import GgufError, GgufFile
from services.common.json_values import Json

__all__ = ["is_encoder", "modules_of", "read_encoder"]

_ENCODERS = ("bert", "nomic-bert")
_CAUSAL = "attention.causal"
_POOLINGS = {1: "mean", 2: "cls", 3: "lasttoken"}
"""Poolings by llama.cpp's numbers, as sentence-transformers calls them"""
_MODULES = "sentence_transformers.models"
_FOLDER = "1_Pooling"


def is_encoder(file: GgufFile) -> bool:
    """Return whether every token sees all tokens of its text.

    Raises GgufError for an encoder with a causal mask.
    """
    key = file.own(_CAUSAL)
    if file.architecture not in _ENCODERS:
        return not file.flag(key, True)
    if file.flag(key, False):
        raise GgufError(f"{file.path}: {key} is true, which is not supported for encoders.")
    return True


def read_encoder(file: GgufFile) -> dict[str, Json]:
    """Return the keys of BERT. Raises GgufError for heads that score texts."""
    if any(name.startswith("cls.") for name in file.tensors):
        raise GgufError(f"{file.path} has a head that scores texts (cls), which is not supported.")
    return {
        "pad_token_id": file.count("tokenizer.ggml.padding_token_id", 0, least=0),
        "type_vocab_size": file.count("tokenizer.ggml.token_type_count", 1),
    }


def modules_of(file: GgufFile) -> dict[str, Json]:
    """Return the files that name the pooling, by their paths; none if the file names none.

    Vectors have length 1, as llama.cpp's server makes them. Raises GgufError for another pooling.
    """
    key = file.own("pooling_type")
    if not file.integer(key, 0):
        return {}
    if (number := file.integer(key)) not in _POOLINGS:
        raise GgufError(f"{file.path}: {key} must be mean (1), cls (2) or last (3), got {number}.")
    paths = {"Transformer": "", "Pooling": _FOLDER, "Normalize": "2_Normalize"}
    return {
        "modules.json": [
            {"idx": index, "name": str(index), "path": path, "type": f"{_MODULES}.{kind}"}
            for index, (kind, path) in enumerate(paths.items())
        ],
        f"{_FOLDER}/config.json": {"pooling_mode": _POOLINGS[number]},
    }
