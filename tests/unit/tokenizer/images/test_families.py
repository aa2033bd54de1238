"""Reading of a checkpoint's form of images, from the files that it has."""

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.tokenizer.images.families import image_tokens, read_image_family
from services.tokenizer.images.image_family import ImageFamily, ImageSize
from services.tokenizer.images.processor_settings import read_processor_settings
from services.tokenizer.text.vocabulary import Vocabulary
from tests.unit.tokenizer.checkpoints import byte_level
from tests.unit.tokenizer.images.checkpoints import KINDS, Kind, seeing, write_kind

_SIZE = ImageSize(40, 30)


def _family(directory: Path) -> ImageFamily | None:
    settings = read_processor_settings(directory)
    return read_image_family(settings, Vocabulary(directory, image_tokens(settings)))


@pytest.mark.parametrize("name", KINDS)
def test_settings_in_a_section_of_the_processor_come_first(tmp_path: Path, name: str) -> None:
    """Newer releases of transformers save them there, beside a file that may be older."""
    kind = KINDS[name]
    expected = seeing(write_kind(tmp_path / "file", kind)).family.expand(_SIZE)
    processor = {**kind.processor, "image_processor": kind.images}
    for place, images in enumerate(({}, {"size": {"height": 1, "width": 1}, "patch_size": 1})):
        moved = replace(kind, processor=processor, images=images)
        directory = write_kind(tmp_path / str(place), moved)
        assert seeing(directory).family.expand(_SIZE) == expected


@pytest.mark.parametrize(
    ("name", "model"),
    [
        (
            "llava",
            {"vision_config": {"model_type": "clip_vision_model", "patch_size": 8}},
        ),
        (
            "llava, all features",
            {"vision_config": {"patch_size": 8}, "vision_feature_select_strategy": "full"},
        ),
        (
            "llava, siglip",
            {
                "vision_config": {"model_type": "siglip_vision_model", "patch_size": 8},
                "vision_feature_select_strategy": "full",
            },
        ),
        ("llava, pixtral", {"vision_config": {"model_type": "pixtral", "patch_size": 4}}),
        (
            "mistral3",
            {
                "vision_config": {"model_type": "pixtral", "patch_size": 4},
                "spatial_merge_size": 2,
            },
        ),
        ("gemma3", {"mm_tokens_per_image": 4}),
        ("idefics3", {"vision_config": {"image_size": 12, "patch_size": 3}, "scale_factor": 2}),
    ],
)
def test_model_replaces_settings_of_the_processor(
    tmp_path: Path, name: str, model: Mapping[str, Any]
) -> None:
    """Older checkpoints have no processor_config.json."""
    expected = seeing(write_kind(tmp_path / "whole", KINDS[name])).family.expand(_SIZE)
    bare = replace(KINDS[name], processor={}, model=model)
    found = seeing(write_kind(tmp_path / "bare", bare)).family.expand(_SIZE)
    assert found == (replace(expected, run=4) if name == "idefics3" else expected)


def test_tokens_are_those_of_config_json(tmp_path: Path) -> None:
    """The engine replaces the embeddings of these ids, whatever their texts are."""
    renamed = replace(KINDS["llava"], tokens=("<s>", "</s>", "<image>", "<picture>"))
    token = byte_level(renamed.tokens).token_to_id("<picture>")
    for key in ("image_token_id", "image_token_index"):
        kind = replace(renamed, model={**renamed.model, key: token})
        family = seeing(write_kind(tmp_path / key, kind)).family
        assert (family.mark, family.placeholder_id) == ("<picture>", token)


_BROKEN: Mapping[str, tuple[Kind, str]] = {
    "no settings of images": (replace(KINDS["llava"], images={}), "preprocessor_config.json"),
    "no token": (replace(KINDS["gemma3"], tokens=("<s>", "</s>")), "<start_of_image>"),
    "a size that varies": (
        replace(KINDS["llava"], images={"size": {"shortest_edge": 9}, "do_center_crop": False}),
        "fixed size",
    ),
    "no patches": (
        replace(KINDS["llava"], processor={"patch_size": 25, "num_additional_image_tokens": 1}),
        "no patches",
    ),
    "no patch size": (replace(KINDS["llava"], processor={}, model={}), "patch_size"),
    "a value of the wrong type": (replace(KINDS["qwen2_vl"], images={"patch_size": "a"}), "'a'"),
    "a negative value": (replace(KINDS["gemma3"], processor={"image_seq_length": -1}), "-1"),
    "another number of tokens": (
        replace(KINDS["gemma4"], images={"max_soft_tokens": 100}),
        "70, 140, 280, 560, 1120",
    ),
    "images as large as they are": (
        replace(KINDS["gemma4"], images={"do_resize": False}),
        "do_resize",
    ),
    "a flag that is no flag": (replace(KINDS["idefics3"], images={"do_resize": 1}), "do_resize"),
    "a size without edges": (replace(KINDS["mistral3"], images={"size": {"a": 1}}), "size"),
}


@pytest.mark.parametrize("name", _BROKEN)
def test_checkpoint_with_unusable_settings_serves_text(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator reads why images are refused, and users of text notice nothing."""
    kind, why = _BROKEN[name]
    assert _family(write_kind(tmp_path, kind)) is None
    assert "requests with images are refused" in caplog.text
    assert why in caplog.text


def test_embedding_without_a_row_for_images_serves_text(tmp_path: Path) -> None:
    """The engine refuses ids beyond the embedding, as of Gemma 3's text models."""
    kind = KINDS["gemma3"]
    size = byte_level(kind.tokens).token_to_id("<image_soft_token>")
    model = {**kind.model, "vocab_size": size}
    assert _family(write_kind(tmp_path, replace(kind, model=model))) is None


def test_text_only_architecture_takes_no_images(tmp_path: Path) -> None:
    """Its users' texts keep every token that they had."""
    directory = write_kind(tmp_path, replace(KINDS["llava"], architecture="LlamaForCausalLM"))
    assert _family(directory) is None
    assert not image_tokens(read_processor_settings(directory))


def test_image_tokens_that_are_not_special_are_control_tokens(tmp_path: Path) -> None:
    """A user's message could otherwise hold the tokens of images."""
    kind = replace(KINDS["llava"], make=lambda tokens: byte_level(tokens[:2], plain=("<image>",)))
    checkpoint = seeing(write_kind(tmp_path, kind, "{{ messages[0].content }}"))
    placeholder = checkpoint.family.placeholder_id
    assert placeholder in checkpoint.vocabulary.encode("<image>")
    assert placeholder not in checkpoint.vocabulary.encode_plain("<image>")


_WITHOUT_TORCH = """
import asyncio, pathlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("numpy", "torch", "torchvision"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
from services.tokenizer.application import TokenizerApplication
from services.tokenizer.settings import TokenizerSettings
from services.tokenizer.images.image_reader import ImageReader
from services.tokenizer.images.request_images import RequestImage
from tests.unit.tokenizer.images.checkpoints import png, seeing

async def read():
    checkpoint = seeing(pathlib.Path(sys.argv[1]))
    TokenizerApplication(TokenizerSettings(model=checkpoint.directory))
    reader = ImageReader(checkpoint.family, checkpoint.vocabulary, "m")
    await reader.read([RequestImage("images[0]", png(40, 30))])

asyncio.run(read())
sys.exit("torch" in sys.modules)
"""


async def test_images_need_no_torch(tmp_path: Path) -> None:
    """torch would cost the service 300 MB of memory, and seconds at every start."""
    directory = write_kind(tmp_path, KINDS["qwen2_vl"])
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _WITHOUT_TORCH, str(directory)
    )
    assert await process.wait() == 0
