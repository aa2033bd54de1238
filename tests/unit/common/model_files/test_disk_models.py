"""Models on the disk: their list, their last use, and their removal from the hub's cache."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from services.common.model_files.disk_models import models_in_cache, models_in_folder
from services.common.model_files.last_use import last_use, record_use
from services.common.model_files.removal import RemovalError, freed_bytes, process_using, remove
from tests.unit.common.model_files.hub_cache import add_repository, gguf_bytes

CONFIG = json.dumps(
    {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "max_position_embeddings": 64}
).encode()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    folder.mkdir()
    return folder


@pytest.fixture
def repositories(cache: Path, tmp_path: Path) -> Path:
    small = {"config.json": CONFIG, "model.safetensors": b"w" * 1000, "tokenizer.json": b"{}"}
    add_repository(cache, "HuggingFaceTB/SmolLM2-135M-Instruct", small)
    gguf = gguf_bytes(tmp_path, 512)
    files = {f"m-Q4_0-0000{part}-of-00002.gguf": gguf + bytes([part]) for part in (1, 2)}
    add_repository(cache, "a/b-GGUF", {**files, "m-Q8_0.gguf": gguf})
    add_repository(cache, "a/cut-GGUF", {"m-Q4_0-00001-of-00002.gguf": gguf})
    return cache


def test_cache_lists_each_model_under_the_name_that_serves_it(repositories: Path) -> None:
    found = {model.name: model for model in models_in_cache()}
    assert list(found) == ["a/b-GGUF:Q4_0", "a/b-GGUF:Q8_0", "a/cut-GGUF:Q4_0", "smollm2"]
    small = found["smollm2"]
    assert (small.quantisation, small.context) == ("bfloat16", 64)
    assert small.num_bytes == 1000 + len(CONFIG) + 2
    assert (found["a/b-GGUF:Q8_0"].quantisation, found["a/b-GGUF:Q8_0"].context) == ("Q8_0", 512)
    assert [model.name for model in found.values() if not model.is_complete] == ["a/cut-GGUF:Q4_0"]


def test_other_revision_is_listed_with_its_name(cache: Path, tmp_path: Path) -> None:
    gguf = gguf_bytes(tmp_path, 512)
    add_repository(cache, "a/b", {"m-Q8_0.gguf": gguf})
    add_repository(cache, "a/b", {"m-Q8_0.gguf": gguf}, commit="f" * 40, revision="v2")
    assert [model.name for model in models_in_cache()] == ["a/b:Q8_0", "a/b:Q8_0@v2"]


def test_interrupted_download_is_listed_so_that_it_can_be_removed(cache: Path) -> None:
    snapshot = add_repository(cache, "a/b", {"config.json": CONFIG})
    (snapshot.parents[1] / "blobs" / "abc.incomplete").write_bytes(b"x" * 10)
    (model,) = models_in_cache()
    assert (model.name, model.is_complete, model.num_bytes) == ("a/b", False, 10)
    remove(model)
    assert list(cache.iterdir()) == []


def test_folder_lists_directories_and_files_below_it(tmp_path: Path) -> None:
    gguf = gguf_bytes(tmp_path, 512)
    models = tmp_path / "models"
    (models / "one").mkdir(parents=True)
    (models / "one" / "config.json").write_bytes(CONFIG)
    (models / "one" / "model.safetensors").write_bytes(b"w")
    (models / "two-Q4_0.gguf").write_bytes(gguf)
    for tower in ("mmproj-F16.gguf", "mmproj-model.gguf"):
        (models / tower).write_bytes(gguf)
    found = models_in_folder(models)
    assert sorted(model.path for model in found) == [models / "one", models / "two-Q4_0.gguf"]


def test_folder_follows_links_and_lists_each_model_once(tmp_path: Path) -> None:
    """People keep one copy of their models and link to it from the folders of several programs."""
    elsewhere, models = tmp_path / "elsewhere", tmp_path / "models"
    (elsewhere / "one").mkdir(parents=True)
    (elsewhere / "one" / "config.json").write_bytes(CONFIG)
    (elsewhere / "one" / "model.safetensors").write_bytes(b"w")
    models.mkdir()
    (models / "linked").symlink_to(elsewhere / "one")
    (models / "loop").symlink_to(models)
    (models / "gone-Q4_0.gguf").symlink_to(elsewhere / "gone-Q4_0.gguf")
    assert [model.path for model in models_in_folder(models)] == [models / "linked"]


def test_file_with_brackets_in_its_name_is_complete(tmp_path: Path) -> None:
    gguf = gguf_bytes(tmp_path, 512)
    folder = tmp_path / "models"
    folder.mkdir()
    names = ("[a] m-Q8_0.gguf", "[b] m-Q4_0-00001-of-00002.gguf", "[b] m-Q4_0-00002-of-00002.gguf")
    for name in names:
        (folder / name).write_bytes(gguf)
    whole, split = models_in_folder(folder)
    assert (whole.is_complete, split.is_complete) == (True, True)
    assert {whole.num_bytes, split.num_bytes} == {len(gguf), 2 * len(gguf)}


def test_removal_keeps_other_models_of_the_repository(repositories: Path) -> None:
    split = next(model for model in models_in_cache() if model.name == "a/b-GGUF:Q4_0")
    assert freed_bytes(split) == split.num_bytes
    remove(split)
    assert "a/b-GGUF:Q8_0" in [model.name for model in models_in_cache()]
    folder = repositories / "models--a--b-GGUF"
    assert len(list((folder / "blobs").iterdir())) == 1
    (other,) = [model for model in models_in_cache() if model.name == "a/b-GGUF:Q8_0"]
    remove(other)
    assert not folder.exists()


def test_file_that_another_revision_needs_stays(cache: Path, tmp_path: Path) -> None:
    gguf = gguf_bytes(tmp_path, 512)
    add_repository(cache, "a/b", {"m-Q8_0.gguf": gguf})
    add_repository(cache, "a/b", {"m-Q8_0.gguf": gguf}, commit="f" * 40, revision="v2")
    main, other = models_in_cache()
    assert freed_bytes(main) == 0
    remove(main)
    assert other.path.read_bytes() == gguf


def test_model_outside_the_cache_is_not_removed(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "mine-Q4_0.gguf").write_bytes(gguf_bytes(tmp_path, 512))
    (model,) = [each for each in models_in_folder(tmp_path) if each.path.name == "mine-Q4_0.gguf"]
    with pytest.raises(RemovalError, match="remove it yourself"):
        remove(model)
    assert model.path.exists()


def test_process_that_has_a_file_open_is_found(repositories: Path) -> None:
    model = next(each for each in models_in_cache() if each.name == "a/b-GGUF:Q8_0")
    assert process_using(model) is None
    program = "import sys; held = open(sys.argv[1][::-1], 'rb'); print(flush=True); input()"
    command = [sys.executable, "-c", program, str(model.path)[::-1]]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert process_using(model) == process.pid
        process.communicate(b"\n")
    assert process_using(model) is None


def test_last_use_is_that_of_the_model(tmp_path: Path) -> None:
    records, one, two = tmp_path / "records", tmp_path / "one", tmp_path / "two"
    record_use(records, one)
    assert last_use(records, one) is not None
    assert last_use(records, two) is None
    record_use(Path("/proc/nowhere"), one)  # a home that can't be written is no error
