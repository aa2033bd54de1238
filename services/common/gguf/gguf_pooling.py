"""Poolings and heads of GGUF files that embed or score texts."""

from services.common.gguf.gguf_file import GgufError, GgufFile
from services.common.json_values import Json

__all__ = ["answers_yes_or_no", "head_of", "modules_of", "read_head"]

_POOLINGS = {1: "mean", 2: "cls", 3: "lasttoken"}
"""Poolings by llama.cpp's numbers, as sentence-transformers calls them"""
_RANK = 4
"""Number of the pooling that ends in a head"""
_HEAD = ("cls", "cls.norm", "cls.output")
"""Tensors of a head, in the order in which it applies them"""
_DENSE = ("dense_2", "dense_3")
"""Linear layers behind the pooling (EmbeddingGemma)"""
_MODULES = "sentence_transformers.models"
_FOLDER = "1_Pooling"
_ANSWERS = ["yes", "no"]
"""Labels of a reranker whose two outputs are the logits of the tokens yes and no"""


def head_of(file: GgufFile) -> list[str]:
    """Return the modules of the head that scores texts, in order; empty if there is no head."""
    return [name for name in _HEAD if f"{name}.weight" in file.tensors]


def read_head(file: GgufFile) -> dict[str, Json]:
    """Return the keys of config.json that describe the head.

    Raises GgufError if the pooling is that of a head, and the file has none.
    """
    head = head_of(file)
    if not head:
        if file.integer(file.own("pooling_type"), 0) == _RANK:
            raise GgufError(f"{file.path} says that it ranks texts, but has no head (cls).")
        return {}
    labels: list[Json] = [*file.texts(file.own("classifier.output_labels"))]
    count = file.tensors[f"{head[-1]}.weight"].shape[0]
    number = file.integer(file.own("classifier.pooling_type"), 0)
    usual = "mean" if file.architecture == "modern-bert" else None
    values: dict[str, Json] = {"num_labels": count}
    if answers_yes_or_no(file):
        return {"num_labels": 1}
    if len(labels) == count:
        values["id2label"] = {str(index): label for index, label in enumerate(labels)}
    if (pooling := _POOLINGS.get(number, usual)) is not None:
        values["classifier_pooling"] = pooling.removesuffix("token")
    return values


def answers_yes_or_no(file: GgufFile) -> bool:
    """Return whether the head's two outputs are the logits of yes and no (Qwen3-Reranker)."""
    head = head_of(file)
    labels = file.texts(file.own("classifier.output_labels"))
    return bool(head) and labels == _ANSWERS


def modules_of(file: GgufFile) -> dict[str, Json]:
    """Return the contents of the files that name the pooling, by path; empty if there is none.

    Vectors have length 1, as llama.cpp's server makes them. Raises GgufError for another pooling.
    """
    key = file.own("pooling_type")
    if head_of(file) or not file.integer(key, 0):
        return {}
    if (number := file.integer(key)) not in _POOLINGS:
        raise GgufError(f"{file.path}: {key} must be mean (1), cls (2) or last (3), got {number}.")
    dense = [name for name in _DENSE if f"{name}.weight" in file.tensors]
    paths = [("Transformer", ""), ("Pooling", _FOLDER), *(("Dense", name) for name in dense)]
    files: dict[str, Json] = {
        "modules.json": [
            {"idx": index, "name": str(index), "path": path, "type": f"{_MODULES}.{kind}"}
            for index, (kind, path) in enumerate([*paths, ("Normalize", "Normalize")])
        ],
        f"{_FOLDER}/config.json": {"pooling_mode": _POOLINGS[number]},
    }
    for name in dense:
        outputs, inputs = file.tensors[f"{name}.weight"].shape
        files[f"{name}/config.json"] = {
            "in_features": inputs,
            "out_features": outputs,
            "bias": False,
            "activation_function": "Identity",
            "in_gguf": True,
        }
    return files
