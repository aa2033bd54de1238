"""Names of models, as users write them."""

from pathlib import Path

import pytest

from services.common.model_files.hub import HubCheckpoint
from services.common.model_files.model_name import ModelNameError, find_model
from services.common.model_files.short_list import listed_models
from services.engine.model.checkpoint.architectures import family_of
from services.engine.model.checkpoint.config import Config


def test_directory_that_exists_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("smollm2").mkdir()
    found = find_model("smollm2")
    assert found.source == Path("smollm2")
    assert found.model_id == ""


@pytest.mark.parametrize(
    ("text", "source", "is_explicit", "model_id"),
    [
        ("smollm2", "hf:HuggingFaceTB/SmolLM2-135M-Instruct", True, "smollm2"),
        (
            "SmolLM2:1.7B",
            "hf:HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF:Q4_K_M",
            True,
            "smollm2:1.7b",
        ),
        ("hf:a/b", "hf:a/b", True, ""),
        ("hf:a/b:Q4_0@v1", "hf:a/b:Q4_0@v1", True, ""),
        ("a/b", "hf:a/b", False, "a/b"),
        ("a/b:q4_k_m@v1", "hf:a/b:q4_k_m@v1", False, "a/b:q4_k_m"),
        ("a/b/c-Q4_0.gguf", "hf:a/b/c-Q4_0.gguf", False, "a/b/c-Q4_0.gguf"),
    ],
)
def test_name_means_a_repository_of_the_hub(
    text: str, source: str, is_explicit: bool, model_id: str
) -> None:
    found = find_model(text)
    assert str(found.source) == source
    assert (found.is_explicit, found.model_id) == (is_explicit, model_id)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("smolm2", "did you mean smollm2"),
        ("zzzz", "name a directory or owner/name"),
        ("./models/nothing", "does not exist"),
        ("a/b/c", "does not exist"),
        ("x.gguf", "does not exist"),
        ("", "does not exist"),
        ("hf:a", "hf:owner/name"),
    ],
)
def test_name_of_nothing_is_refused_with_a_remedy(text: str, reason: str) -> None:
    with pytest.raises(ModelNameError, match=reason):
        find_model(text)


def test_misspelled_path_is_not_looked_for_in_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    with pytest.raises(ModelNameError, match="hf:models/smal is that repository"):
        find_model("models/smal")


def test_every_model_of_the_short_list_can_be_served() -> None:
    """A name that is offered and then refused after a download would be a bad first impression."""
    names: list[str] = []
    for row in listed_models():
        names += (row.name, *row.aliases)
        HubCheckpoint.parse(f"hf:{row.source}")
        family_of(Config(row.name, {"architectures": [row.architecture]}))
        assert row.licence in ("Apache-2.0", "MIT")
        assert 0 < row.download < row.memory
    assert len(names) == len(set(names))
    assert all(name == name.lower() for name in names)
