"""Wrong model folders: each refusal is one sentence that names the remedy."""

import json
from pathlib import Path

import pytest

from services.common.model_files.checkpoint_folder import (
    CheckpointFolderError,
    require_config,
    require_readable,
    served_name,
)
from tests.unit.tokenwire.serving.test_stack_layout import assert_refused, serve

CONFIG = json.dumps({"architectures": ["LlamaForCausalLM"]})
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
INDEX = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})


@pytest.mark.parametrize(
    ("files", "remedy"),
    [
        ({"a-q4.gguf": "", "a-q8.gguf": ""}, "holds 2 GGUF files (a-q4.gguf, a-q8.gguf"),
        ({"adapter_config.json": '{"base_model_name_or_path": "a/b"}'}, "merge it into a/b"),
        ({"adapter_config.json": "[]", "adapter_model.safetensors": ""}, "its base model"),
        ({"config.json": CONFIG, "pytorch_model.bin": ""}, "AutoModelForCausalLM"),
        ({"config.json": CONFIG, "model.safetensors": POINTER}, "git lfs pull"),
        ({"config.json": CONFIG, "model.safetensors": "", "tokenizer.json": POINTER}, "git lfs"),
        (
            {
                "config.json": CONFIG,
                "model.safetensors.index.json": INDEX,
                "model-1.safetensors": "",
            },
            "such as model-2.safetensors",
        ),
        ({"refs/main": "abc", "snapshots/abc/config.json": CONFIG}, "snapshots/abc"),
        ({"models--a--b/snapshots/abc/config.json": CONFIG}, "models--a--b/snapshots/abc"),
    ],
)
def test_folder_that_is_not_read_is_refused_with_the_remedy(
    tmp_path: Path, files: dict[str, str], remedy: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointFolderError) as refused:
        require_readable(tmp_path)
    assert remedy in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [("{", "cannot be read as JSON"), ("[]", "no architectures"), ("{}", "no architectures")],
)
def test_bad_config_is_refused_before_a_service_starts(
    tmp_path: Path, content: str, reason: str
) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointFolderError, match=reason):
        require_config(tmp_path)
    assert_refused(serve("--model", str(tmp_path)), reason)


def test_repository_is_downloaded_only_where_the_user_asks_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert_refused(serve("Owner/Name-7B"), "no Owner/Name-7B on this machine", "--download")


def test_file_is_refused_with_its_remedy(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    assert_refused(serve("--model", str(tmp_path / "model.safetensors")), "give the directory")


def test_gguf_file_is_served_under_its_name(tmp_path: Path) -> None:
    for name in ("coder-Q4_0.gguf", "coder-Q4_0-00001-of-00002.gguf"):
        assert served_name(tmp_path / name) == "coder-Q4_0"


def test_snapshot_is_served_under_the_name_of_its_repository(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--Qwen--Qwen2.5-Coder-0.5B" / "snapshots" / "8123ea2e"
    snapshot.mkdir(parents=True)
    assert served_name(snapshot) == "Qwen/Qwen2.5-Coder-0.5B"
    assert served_name(tmp_path) == tmp_path.name
