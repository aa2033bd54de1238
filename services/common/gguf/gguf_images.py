"""Vision-language model in a GGUF file with an mmproj file.

An mmproj file of llama.cpp holds the vision tower and the projector: the architecture `clip`, keys
below `clip.vision`, and tensors whose names begin with `v.` and `mm.`.
"""

import copy
from collections.abc import Mapping
from pathlib import Path

from services.common.gguf.gguf_file import GgufError, GgufFile
from services.common.gguf.gguf_image_pair import VISION, ImageModel, ImagePair
from services.common.gguf.gguf_projectors import PROJECTORS, SOFT_TOKEN, Projector
from services.common.json_values import Json

__all__ = ["read_image_model"]

_ARCHITECTURE = "clip"
_TOKENS, _KINDS = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
_CONTROL = 3
"""Number of special tokens in the list of kinds"""
_UNUSED = "<unused"


def read_image_model(text: GgufFile, values: Mapping[str, Json], mmproj: Path) -> ImageModel:
    """Return the model of a text model's file and an mmproj file.

    values: content of config.json for the text model alone. Raises GgufError for an mmproj file
    that is damaged, that belongs to another model, or whose projector is not supported.
    """
    file = GgufFile(mmproj.absolute())
    kind = _projector_type(file)
    projector = PROJECTORS[kind]
    if text.architecture not in projector.architectures:
        raise GgufError(
            f"{mmproj} belongs to another model: its projector {kind} goes with the architectures "
            f"{', '.join(projector.architectures)}, and {text.path.name} has {text.architecture}."
        )
    _require_width(text, file, projector)
    changed = _with_image_tokens(text, [*projector.tokens.values(), *projector.marks])
    found = changed.texts(_TOKENS)
    ids: dict[str, Json] = {key: found.index(each) for key, each in projector.tokens.items()}
    architecture = projector.architectures[text.architecture]
    return projector.read(ImagePair(changed, file, values, architecture, ids))


def _projector_type(file: GgufFile) -> str:
    """Return the type of the projector. Raises GgufError unless it is supported."""
    if file.architecture != _ARCHITECTURE:
        raise GgufError(
            f"{file.path} is no mmproj file: its architecture is {file.architecture:.60}, not "
            f"{_ARCHITECTURE}."
        )
    key = "clip.projector_type"
    kind = file.text(key if key in file.metadata else f"{VISION}.projector_type", "mlp")
    if kind not in PROJECTORS:
        raise GgufError(
            f"{file.path}: the projector type {kind:.60} is not supported. Supported: "
            f"{', '.join(PROJECTORS)}."
        )
    return kind


def _require_width(text: GgufFile, file: GgufFile, projector: Projector) -> None:
    """Raise GgufError unless the projector's outputs are as wide as the text model."""
    tensor = file.tensors.get(projector.output)
    if tensor is None:
        raise GgufError(f"{file.path} is damaged: it has no {projector.output}.")
    made = tensor.shape[-1 if projector.outputs_last else 0]
    width = text.count(text.own("embedding_length"))
    if made != width:
        raise GgufError(
            f"{file.path} belongs to another model: its projector makes {made} numbers of a token, "
            f"and {text.path.name} takes {width}."
        )


def _with_image_tokens(text: GgufFile, wanted: list[str]) -> GgufFile:
    """Return the text model's file with the tokens of an image as special tokens.

    Files of Gemma 3 may end before its <image_soft_token>, which stands for a part of an image in
    prompts; their last unused token becomes it. Raises GgufError if another token is missing.
    """
    tokens = text.texts(_TOKENS)
    kinds = [*text.numbers(_KINDS)] or [1] * len(tokens)
    places = {token: index for index, token in enumerate(tokens) if token in wanted}
    for token in wanted:
        if token not in places:
            place = _unused(tokens) if token == SOFT_TOKEN else None
            if place is None:
                raise GgufError(f"{text.path} has no token {token}, which stands for images.")
            places[token] = place
            tokens = [*tokens[:place], token, *tokens[place + 1 :]]
        if places[token] < len(kinds):
            kinds[places[token]] = _CONTROL
    changed = copy.copy(text)
    changed.metadata = {**text.metadata, _TOKENS: tokens, _KINDS: [int(each) for each in kinds]}
    return changed


def _unused(tokens: list[str]) -> int | None:
    """Return the number of the last unused token; None if there is none."""
    numbers = range(len(tokens) - 1, -1, -1)
    return next((number for number in numbers if tokens[number].startswith(_UNUSED)), None)
