"""mmproj files beside GGUF models: which one is taken, and why others are not."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from transformers import PreTrainedModel

from services.common.gguf.checkpoint_files import MMPROJ
from services.common.gguf.gguf_image_pair import ImagePair
from services.common.model_files.checkpoint import opened_checkpoint
from services.common.model_files.mmproj_file import is_mmproj, mmproj_beside
from services.common.settings import StartupError
from services.engine.vision.support import has_vision, refused_images
from services.tokenizer.images.families import image_tokens, read_image_family
from services.tokenizer.images.image_family import ImageFamily, ImageSize
from services.tokenizer.images.processor_settings import read_processor_settings
from services.tokenizer.text.vocabulary import Vocabulary
from tests.unit.engine.mmproj_checkpoints import (
    PAIRS,
    tower_of,
    write_mmproj,
    write_pair,
    write_text,
)
from tests.unit.engine.vision_checkpoints import IMAGE_TOKEN


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a model of Gemma 3 beside its mmproj file."""
    write_pair(tmp_path, "gemma3")
    return tmp_path / "model.gguf"


def why_refused(model: Path) -> str:
    """Return why a model is served without images."""
    with opened_checkpoint(model, "") as directory:
        assert not has_vision(directory)
        why = refused_images(directory)
        assert why is not None
        return why


def family_of(directory: Path) -> ImageFamily | None:
    settings = read_processor_settings(directory)
    return read_image_family(settings, Vocabulary(directory, image_tokens(settings)))


def write_changed(
    directory: Path, name: str, further: Callable[[GGUFWriter], None], pair: str = "gemma3"
) -> None:
    """Write an mmproj file with other values. pair: model that it is for."""
    whole: PreTrainedModel = write_pair(directory / "other", pair)
    write_mmproj(directory / name, PAIRS[pair], tower_of(whole), further=further)


def settings_of(directory: Path) -> Mapping[str, Any]:
    return {
        name: json.loads((directory / f"{name}.json").read_text())
        for name in ("config", "preprocessor_config")
    }


@pytest.mark.parametrize("name", ["mmproj-F16.gguf", "google_gemma-3-4b-it.MMPROJ-f16.gguf"])
def test_file_beside_the_model_is_found_by_its_name(model: Path, name: str) -> None:
    (model.parent / "mmproj-model.gguf").rename(model.with_name(name))
    with opened_checkpoint(model, "") as directory:
        assert [link.name for link in (directory / MMPROJ).iterdir()] == [name]


def test_directory_of_a_model_and_its_mmproj_file_is_served(model: Path) -> None:
    with opened_checkpoint(model.parent, "") as directory:
        assert has_vision(directory)


@pytest.mark.parametrize("path", ["/model.gguf", "/no-such-folder/model.gguf"])
def test_model_near_the_root_of_the_disk_is_read(path: str) -> None:
    """The images of Docker have it in /model."""
    assert not [file for file in mmproj_beside(Path(path)) if not is_mmproj(file)]


def test_draft_model_reads_no_mmproj_file(model: Path) -> None:
    with opened_checkpoint(model) as directory:
        assert not has_vision(directory)
        assert refused_images(directory) is None


def test_named_file_may_lie_anywhere(model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    named = tmp_path_factory.mktemp("elsewhere") / "vision.gguf"
    (model.parent / "mmproj-model.gguf").rename(named)
    with opened_checkpoint(model, str(named)) as directory:
        assert has_vision(directory)


def test_prompts_get_the_tokens_of_the_tower(model: Path) -> None:
    """The prompt of another number of tokens than the tower makes would be refused."""
    with opened_checkpoint(model, "") as directory:
        family = family_of(directory)
    assert family is not None
    expansion = family.expand(ImageSize(100, 50))
    assert (family.placeholder_id, expansion.run) == (IMAGE_TOKEN, 4)
    assert expansion.core == "<start_of_image><image_soft_token><end_of_image>"


@pytest.mark.parametrize("name", ["pixtral", "smolvlm"])
def test_tokens_around_images_are_special(name: str, tmp_path: Path) -> None:
    """Files may list them as tokens of users, and then a message could fake an image."""
    write_pair(tmp_path, name)
    with opened_checkpoint(tmp_path, "") as directory:
        family = family_of(directory)
    assert family is not None
    assert {*family.control_tokens} <= {*PAIRS[name].tokens}


@pytest.mark.parametrize(("width", "sight"), [(1536, "none"), (2560, "none"), (64, "vision")])
def test_images_of_gemma_4_see_ahead_in_all_but_the_small_models(
    width: int, sight: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pair(tmp_path, "gemma4")
    monkeypatch.setattr(ImagePair, "width", width)
    with opened_checkpoint(tmp_path, "") as directory:
        text = settings_of(directory)["config"]["text_config"]
    assert text["use_bidirectional_attention"] == sight


def test_unused_token_stands_for_images_where_the_vocabulary_ends_before_theirs(
    tmp_path: Path,
) -> None:
    """So end Google's own files of Gemma 3."""
    whole = write_pair(tmp_path, "gemma3")
    tokens = ("<unused7>", "<start_of_image>", "<end_of_image>")
    write_text(tmp_path / "model.gguf", PAIRS["gemma3"], whole, tokens)
    with opened_checkpoint(tmp_path, "") as directory:
        family = family_of(directory)
    assert family is not None
    assert (family.placeholder, family.placeholder_id) == ("<image_soft_token>", IMAGE_TOKEN)


def test_model_without_tokens_of_images_serves_text(tmp_path: Path) -> None:
    whole = write_pair(tmp_path, "pixtral")
    write_text(tmp_path / "model.gguf", PAIRS["pixtral"], whole, ("<a>", "<b>", "<c>"))
    assert why_refused(tmp_path).endswith("has no token [IMG], which stands for images.")


def test_sizes_that_the_file_lacks_are_those_of_the_published_model(tmp_path: Path) -> None:
    whole = write_pair(tmp_path, "qwen2.5 vl")
    pair = PAIRS["qwen2.5 vl"]

    def write_pattern(writer: GGUFWriter, config: Any) -> None:
        writer.add_vision_attention_layernorm_eps(1e-6)
        writer.add_vision_n_wa_pattern(2)

    bare = replace(pair, keys=write_pattern)
    write_mmproj(tmp_path / "mmproj-model.gguf", bare, tower_of(whole))
    with opened_checkpoint(tmp_path, "") as directory:
        settings = settings_of(directory)
    limits = {"shortest_edge": 3136, "longest_edge": 12_845_056}
    assert settings["preprocessor_config"]["size"] == limits
    assert settings["config"]["vision_config"]["window_size"] == 112


def test_file_of_another_model_leaves_text_and_says_why(model: Path) -> None:
    write_changed(model.parent, "mmproj-model.gguf", lambda _: None, "qwen3 vl")
    assert why_refused(model) == (
        f"{model.parent}/mmproj-model.gguf belongs to another model: its projector qwen3vl_merger "
        "goes with the architectures qwen3vl, qwen3vlmoe, qwen35, qwen35moe, and model.gguf has "
        "gemma3."
    )


def test_file_of_a_larger_model_leaves_text_and_says_why(model: Path) -> None:
    whole = write_pair(model.parent / "other", "gemma3")
    tower = tower_of(whole)
    name = "multi_modal_projector.mm_input_projection_weight"
    tower[name] = tower[name].repeat(1, 2)
    write_mmproj(model.parent / "mmproj-model.gguf", PAIRS["gemma3"], tower)
    assert why_refused(model) == (
        f"{model.parent}/mmproj-model.gguf belongs to another model: its projector makes 128 "
        "numbers of a token, and model.gguf takes 64."
    )


def test_unknown_projector_leaves_text_and_says_which_are_known(model: Path) -> None:
    write_changed(
        model.parent,
        "mmproj-model.gguf",
        lambda writer: writer.add_clip_projector_type("cogvlm"),
    )
    assert why_refused(model) == (
        f"{model.parent}/mmproj-model.gguf: the projector type cogvlm is not supported. Supported: "
        "gemma3, qwen2vl_merger, qwen2.5vl_merger, qwen3vl_merger, pixtral, idefics3, gemma4v."
    )


def test_truncated_file_leaves_text_and_says_so(model: Path) -> None:
    file = model.with_name("mmproj-model.gguf")
    file.write_bytes(file.read_bytes()[:2000])
    assert why_refused(model) == f"{file} is damaged or truncated; download it again."


def test_several_files_that_fit_are_named(model: Path) -> None:
    file = model.with_name("mmproj-model.gguf")
    model.with_name("mmproj-F16.gguf").write_bytes(file.read_bytes())
    assert why_refused(model) == (
        f"{model.parent} holds 2 mmproj files that fit model.gguf (mmproj-F16.gguf, "
        "mmproj-model.gguf). Name one with --mmproj."
    )


def test_the_one_of_several_files_that_fits_is_taken(model: Path) -> None:
    """A folder may hold the files of several models."""
    write_changed(model.parent, "mmproj-another.gguf", lambda _: None, "qwen3 vl")
    with opened_checkpoint(model, "") as directory:
        assert [link.name for link in (directory / MMPROJ).iterdir()] == ["mmproj-model.gguf"]


def test_named_file_that_does_not_fit_ends_the_start(model: Path) -> None:
    write_changed(model.parent, "mmproj-another.gguf", lambda _: None, "qwen3 vl")
    named = str(model.with_name("mmproj-another.gguf"))
    with (
        pytest.raises(StartupError, match="belongs to another model"),
        opened_checkpoint(model, named),
    ):
        pass


def test_named_model_in_place_of_an_mmproj_file_is_refused(model: Path) -> None:
    with pytest.raises(StartupError) as raised, opened_checkpoint(model, str(model)):
        pass
    assert str(raised.value) == f"{model} is no mmproj file: its architecture is gemma3, not clip."


def test_named_file_needs_a_gguf_model(tmp_path: Path) -> None:
    with pytest.raises(StartupError) as raised, opened_checkpoint(tmp_path, "mmproj.gguf"):
        pass
    assert str(raised.value) == (
        "--mmproj mmproj.gguf needs a model in a GGUF file. Start without it."
    )


@pytest.mark.parametrize(
    ("pair", "key", "value", "reason"),
    [
        ("gemma3", "block_count", 1 << 30, "block_count must be a whole number from 1 to 55"),
        ("gemma3", "embedding_length", 64, "has the shape [32, 3, 7, 7], but its keys ask for"),
        ("gemma3", "image_size", 1 << 20, "has 16 positions, and clip.vision.image_size is"),
        (
            "qwen3 vl",
            "attention.head_count",
            3,
            "is 32, which is not divisible by",
        ),
        ("qwen3 vl", "image_min_pixels", 1 << 31, "image_min_pixels must be a whole number from"),
        ("qwen2.5 vl", "block_count", 1 << 31, "block_count must be a whole number from 1 to"),
        (
            "pixtral",
            "attention.head_count",
            32,
            "a head has 1 numbers, and its rotation needs",
        ),
        ("pixtral", "image_size", 3, "image_size must be a whole number of at least 7"),
        ("smolvlm", "preproc_image_size", 1 << 30, "preproc_image_size must be a whole number"),
        ("gemma4", "projector.scale_factor", 1 << 30, "scale_factor must be a whole number from"),
    ],
)
def test_sizes_that_are_not_those_of_the_tensors_are_refused_at_once(
    pair: str, key: str, value: int, reason: str, tmp_path: Path
) -> None:
    """A tower of them would take hours or all memory, or fail on each image."""
    whole = write_pair(tmp_path, pair)
    write_mmproj(
        tmp_path / "mmproj-model.gguf",
        PAIRS[pair],
        tower_of(whole),
        further=lambda writer: writer.add_uint32(f"clip.vision.{key}", value),
    )
    assert reason in why_refused(tmp_path)


@pytest.mark.parametrize(
    ("pair", "name", "reason"),
    [
        (
            "gemma4",
            "vision_tower.patch_embedder.position_embedding_table",
            "v.position_embd.weight must have 3 dimensions",
        ),
        (
            "qwen3 vl",
            "visual.pos_embed.weight",
            "v.position_embd.weight must have 2 dimensions",
        ),
    ],
)
def test_tensor_of_another_form_is_refused_by_name(
    pair: str, name: str, reason: str, tmp_path: Path
) -> None:
    tower = tower_of(write_pair(tmp_path, pair))
    tower[name] = tower[name].flatten()
    write_mmproj(tmp_path / "mmproj-model.gguf", PAIRS[pair], tower)
    assert reason in why_refused(tmp_path)


def test_long_text_of_a_file_is_cut_in_the_message(model: Path) -> None:
    write_changed(
        model.parent,
        "mmproj-model.gguf",
        lambda writer: writer.add_clip_projector_type("x" * 100_000),
    )
    assert len(why_refused(model)) < 1000
