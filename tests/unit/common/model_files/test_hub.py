"""Models of a hub: downloaded when a user names one with hf:, and only then."""

import hashlib
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.model_files.hub import HubCheckpoint, HubError
from services.common.model_files.mmproj_file import mmproj_beside
from services.common.model_files.model_name import ModelNameError, find_model
from tests.unit.common.model_files.hub_server import COMMIT, Hub, running_hub
from tests.unit.tokenwire.serving.test_stack_layout import assert_refused
from tokenwire.serving.serve_options import ServeOptions
from tokenwire.serving.stack_layout import plan, plan_catalog

CONFIG = json.dumps({"architectures": ["LlamaForCausalLM"]})
EMBEDDERS = [
    *("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"),
    "adapters/retrieval/adapter_model.safetensors",
]
CARD = "README.md"
NEEDED = ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, empty."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("HF_HOME", str(folder))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return folder


@pytest.fixture
def hub(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    def make(name: str, *files: str) -> Path:
        folder = tmp_path / "hub" / name
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(CONFIG if file == "config.json" else f"{name} {file}")
        return folder

    repositories = {
        "a/model": make(
            "model",
            *NEEDED,
            *("pytorch_model.bin", "consolidated.safetensors", "onnx/model.onnx", "README.md"),
            *("original/consolidated.safetensors", "original/params.json", "image.png"),
        ),
        "a/embedder": make(
            "embedder",
            *(*NEEDED, *EMBEDDERS, "colbert_linear.pt", "pytorch_model.bin", "onnx/config.json"),
            *("assets/notes.json", "openvino/model.safetensors"),
        ),
        "a/pickle": make("pickle", "config.json", "pytorch_model.bin"),
        "a/quantised": make("quantised", "m-Q4_0.gguf", "m-Q8_0.gguf", "README.md"),
        "a/split": make("split", *(f"s-0000{i}-of-00002.gguf" for i in (1, 2)), "s-Q8_0.gguf"),
        "a/parts": make("parts", *(f"p-Q4_K_M-0000{i}-of-00002.gguf" for i in (1, 2))),
        "a/seeing": make(
            "seeing",
            *("m-Q4_K_M.gguf", "m-Q8_0.gguf", "Q2_K/m-Q2_K.gguf"),
            *("mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf"),
        ),
        "a/gated": make("gated", *NEEDED),
    }
    with running_hub(Hub(repositories, gated="a/gated")) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield hub


def tokenwire(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tokenwire", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def pulled_by_command(*arguments: str) -> Path:
    result = tokenwire("pull", *arguments)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    (line,) = result.stdout.splitlines()
    return Path(line)


def pulled(name: str, to: Path | None = None) -> Path:
    """Download in this process, whose imports would take longer than all downloads."""
    source = find_model(name).source
    assert isinstance(source, HubCheckpoint)
    return source.chosen().download(to)


def test_only_the_files_that_are_read_are_downloaded(hub: Hub, cache: Path) -> None:
    folder = pulled_by_command("hf:a/model")
    assert sorted(os.listdir(folder)) == sorted(hub.downloaded) == [CARD, *NEEDED]
    assert (folder / "model.safetensors").read_text() == "model model.safetensors"
    assert folder.is_relative_to(cache)


def test_progress_of_a_download_can_be_read_by_programs(hub: Hub) -> None:
    result = tokenwire("pull", "hf:a/model", "--json")
    assert result.returncode == 0, result.stderr
    *progress, last = [json.loads(line) for line in result.stdout.splitlines()]
    size = sum((hub.repositories["a/model"] / name).stat().st_size for name in NEEDED)
    assert {each["total"] for each in progress} == {size}
    counts = [each["completed"] for each in progress]
    assert counts == sorted(counts)
    assert 0 < counts[0] <= size
    assert sorted(os.listdir(last["path"])) == [CARD, *NEEDED]


def test_modules_and_adapters_of_an_embedder_are_downloaded(hub: Hub) -> None:
    """Without the one that names the pooling, an engine would not start."""
    pulled("hf:a/embedder")
    assert sorted(hub.downloaded) == sorted([*NEEDED, *EMBEDDERS, "colbert_linear.pt"])


def test_download_says_how_large_it_is_and_is_not_repeated(hub: Hub) -> None:
    assert "hf:a/model: 3 files, 0.00 GB" in tokenwire("pull", "hf:a/model").stderr
    hub.downloaded.clear()
    again = tokenwire("pull", "hf:a/model")
    assert again.returncode == 0
    assert again.stderr == ""
    assert hub.downloaded == []


def test_cache_serves_without_a_connection(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = pulled_by_command("hf:a/model")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    assert pulled_by_command("hf:a/model") == folder
    other = tokenwire("pull", "hf:a/other")
    assert_refused(other, "does not have all of hf:a/other")
    assert len(other.stderr.splitlines()) == 1  # no warning for each of several attempts
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert pulled_by_command("hf:a/model") == folder
    assert_refused(tokenwire("pull", "hf:a/other"), "does not have all of hf:a/other")


def test_half_a_download_is_not_served(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    (pulled("hf:a/model") / "tokenizer.json").unlink()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert_refused(tokenwire("pull", "hf:a/model"), "does not have all of hf:a/model")


def test_directory_of_the_users_choice_has_the_files_themselves(hub: Hub, tmp_path: Path) -> None:
    folder = pulled_by_command("hf:a/model", "--to", str(tmp_path / "here"))
    assert folder == tmp_path / "here"
    assert (folder / "model.safetensors").is_file()
    assert not (folder / "model.safetensors").is_symlink()


def test_gguf_file_is_downloaded_alone(hub: Hub) -> None:
    file = pulled("hf:a/quantised/m-Q8_0.gguf@main")
    assert file.read_text() == "quantised m-Q8_0.gguf"
    assert hub.downloaded == ["m-Q8_0.gguf"]


def test_split_gguf_file_is_downloaded_whole(hub: Hub) -> None:
    file = pulled("hf:a/split/s-00001-of-00002.gguf")
    assert file.name == "s-00001-of-00002.gguf"
    assert sorted(hub.downloaded) == ["s-00001-of-00002.gguf", "s-00002-of-00002.gguf"]


def test_repository_of_gguf_files_gives_the_most_sensible_one_and_says_so(hub: Hub) -> None:
    result = tokenwire("pull", "hf:a/quantised")
    assert result.stdout.strip().endswith("m-Q4_0.gguf")
    assert "a/quantised has GGUF files alone (Q4_0, Q8_0): taking Q4_0." in result.stderr
    assert hub.downloaded == ["m-Q4_0.gguf"]


def test_tag_picks_a_quantisation_of_one_file_or_of_several(hub: Hub) -> None:
    assert pulled("a/quantised:q8_0").name == "m-Q8_0.gguf"
    assert pulled("hf:a/parts:Q4_K_M@main").name == "p-Q4_K_M-00001-of-00002.gguf"
    parts = [f"p-Q4_K_M-0000{part}-of-00002.gguf" for part in (1, 2)]
    assert sorted(hub.downloaded) == ["m-Q8_0.gguf", *parts]


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("a/seeing:q8_0", "m-Q8_0.gguf"),
        ("a/seeing", "m-Q4_K_M.gguf"),
        ("hf:a/seeing/Q2_K/m-Q2_K.gguf", "Q2_K/m-Q2_K.gguf"),
    ],
)
def test_one_mmproj_file_comes_with_a_gguf_file(hub: Hub, name: str, file: str) -> None:
    """Without it, the model would take text alone, and with all of them none would be chosen."""
    path = pulled(name)
    assert sorted(hub.downloaded) == sorted([file, "mmproj-F16.gguf"])
    assert [each.name for each in mmproj_beside(path)] == ["mmproj-F16.gguf"]


def test_missing_gguf_file_is_refused_where_an_mmproj_file_is_there(hub: Hub) -> None:
    with pytest.raises(HubError, match="does not exist; name one of its 3 files"):
        pulled("hf:a/seeing/m-Q5_0.gguf")
    assert hub.downloaded == []


def test_what_is_on_disk_is_served_without_asking_the_hub(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = pulled("a/quantised:Q8_0")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    for name in ("a/quantised:q8_0", "a/quantised", "hf:a/quantised/m-Q8_0.gguf"):
        assert find_model(name).on_disk() == file
    assert find_model("a/quantised:Q4_0").on_disk() is None
    assert find_model("a/model").on_disk() is None


def test_plain_name_is_downloaded_only_with_consent(hub: Hub) -> None:
    refused = tokenwire("serve", "a/model")
    assert_refused(refused, "no a/model on this machine; --download downloads it from the hub (")
    assert hub.downloaded == []
    tokenwire("serve", "a/model", "--download")
    assert sorted(set(hub.downloaded)) == [CARD, *NEEDED]


@pytest.mark.parametrize(("answer", "downloads"), [("\n", True), ("n\n", False), ("\x04", False)])
def test_person_on_a_terminal_is_asked_once_with_the_size(
    hub: Hub, answer: str, downloads: bool
) -> None:
    output = on_terminal(answer, "serve", "a/model")
    assert output.count("Download it from the hub (") == 1
    assert ("a/model was not downloaded" in output) == (not downloads)
    assert bool(hub.downloaded) == downloads
    if downloads:
        assert "Download it from the hub" not in on_terminal(answer, "serve", "a/model")


def on_terminal(answer: str, *arguments: str) -> str:
    """Run a command on a terminal of its own, answer its question, and return what it shows."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-m", "tokenwire", *arguments])
    shown = b""
    try:
        while part := os.read(terminal, 4096):
            shown += part
            if b"[Y/n] " in part:
                os.write(terminal, answer.encode())
    except OSError:  # Linux reports the end of a terminal's process so
        pass
    os.waitpid(pid, 0)
    os.close(terminal)
    return shown.decode()


def interrupted(hub: Hub, cache: Path, content: bytes) -> Path:
    """Leave a beginning of a file, as a download that was interrupted does."""
    digest = hashlib.sha256((hub.repositories["a/model"] / "model.safetensors").read_bytes())
    blobs = cache / "hub" / "models--a--model" / "blobs"
    blobs.mkdir(parents=True)
    partial = blobs / f"{digest.hexdigest()}.tokenwire.incomplete"
    partial.write_bytes(content)
    return partial


def test_interrupted_download_continues(hub: Hub, cache: Path) -> None:
    partial = interrupted(hub, cache, b"model ")
    result = tokenwire("pull", "hf:a/model")
    assert hub.ranges == ["bytes=6-"]
    assert "model.safetensors: " in result.stderr, "one line for a file where there is no terminal"
    folder = Path(result.stdout.strip())
    assert (folder / "model.safetensors").read_text() == "model model.safetensors"
    assert not partial.exists()
    hub.downloaded.clear()
    pulled("hf:a/model")
    assert hub.downloaded == []


def test_damaged_beginning_is_found_out(hub: Hub, cache: Path) -> None:
    """An engine would serve nonsense from such weights."""
    partial = interrupted(hub, cache, b"wrong ")
    assert_refused_at_last(tokenwire("pull", "hf:a/model"), "is damaged: download it again")
    assert not partial.exists()
    assert (pulled("hf:a/model") / "model.safetensors").read_text() == "model model.safetensors"


def test_download_into_a_directory_continues_too(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "model.safetensors.tokenwire.incomplete").write_bytes(b"model mod")
    folder = pulled("hf:a/model", tmp_path / "here")
    assert hub.ranges == ["bytes=9-"]
    assert hub.downloaded.count("model.safetensors") == 1
    assert (folder / "model.safetensors").read_text() == "model model.safetensors"


def test_disk_without_room_is_refused_before_the_download(hub: Hub, tmp_path: Path) -> None:
    program = (
        "import shutil, collections\n"
        "usage = collections.namedtuple('usage', 'total used free')\n"
        "shutil.disk_usage = lambda place: usage(10, 9, 1)\n"
        "from tokenwire.cli import main\n"
        "main(['pull', 'hf:a/model'])\n"
    )
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert_refused_at_last(result, "0.00 GB free: remove a model with `tokenwire rm`")
    assert hub.downloaded == []


def assert_refused_at_last(result: subprocess.CompletedProcess[str], reason: str) -> None:
    """Require exit code 2, and the reason in the last line of stderr."""
    assert result.returncode == 2
    assert reason in result.stderr.splitlines()[-1]


def test_revision_may_be_a_commit(hub: Hub) -> None:
    assert pulled(f"hf:a/model@{COMMIT}").name == COMMIT


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("hf:a/pickle", "no safetensors and no GGUF files"),
        ("hf:a/quantised:Q5_K_M", "no GGUF file Q5_K_M; its quantisations: Q4_0, Q8_0"),
        ("hf:a/quantised/m-Q5_0.gguf", "m-Q5_0.gguf does not exist; name one of its 2 files"),
        ("hf:a/none", "no model a/none that you may read"),
        ("hf:a/model@v9", "a/model has no revision v9"),
        ("hf:a/gated", "set HF_TOKEN"),
        ("hf:model", "hf:owner/name"),
        ("hf:../model", "hf:"),
    ],
)
def test_wrong_name_is_refused_in_one_sentence(hub: Hub, name: str, reason: str) -> None:
    with pytest.raises((HubError, ModelNameError)) as refused:
        pulled(name)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_command_says_what_is_wrong_with_a_name(hub: Hub) -> None:
    assert_refused(tokenwire("pull", "hf:a/none"), "no model a/none that you may read")


def test_address_of_the_hub_without_a_scheme_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "hub.example")
    assert_refused(tokenwire("pull", "hf:a/model"), "The hub hub.example did not answer: Request")


def test_serve_downloads_what_it_is_to_serve(hub: Hub) -> None:
    # the download is complete, and its content is then refused
    result = tokenwire("serve", "--model", "hf:a/model")
    assert result.returncode == 2
    assert sorted(set(hub.downloaded)) == [CARD, *NEEDED]
    assert tokenwire("serve", "--model", "hf:a/none").returncode == 2


def test_wrong_flag_is_refused_before_anything_is_downloaded(hub: Hub) -> None:
    result = tokenwire("serve", "--model", "hf:a/model", "--dtype", "fp16")
    assert_refused(result, "engine: --dtype must be one of")
    assert hub.downloaded == []


def test_architecture_is_refused_before_the_weights_are_downloaded(hub: Hub) -> None:
    config = hub.repositories["a/model"] / "config.json"
    config.write_text(json.dumps({"architectures": ["Unheard"]}))
    result = tokenwire("serve", "--model", "hf:a/model")
    assert_refused(result, "config.json of hf:a/model: the architecture Unheard is not supported")
    assert hub.downloaded == ["config.json"]


def test_model_beyond_the_memory_is_refused_before_it_is_downloaded(hub: Hub) -> None:
    program = (
        "from services.engine import start_check\n"
        "from services.common.model_files.hub import HubCheckpoint\n"
        "from tokenwire.serving.start_check import check_before_download\n"
        "start_check.free_host_memory = lambda: 1\n"
        "check_before_download(HubCheckpoint.parse('hf:a/model'), ('--device', 'cpu'))\n"
    )
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "ServeError: engine: The weights take" in result.stderr
    assert "of memory are missing" in result.stderr
    assert hub.downloaded == ["config.json"]


def test_snapshot_is_planned_without_a_connection(hub: Hub, tmp_path: Path) -> None:
    folder = pulled("hf:a/model")
    engine = next(s for s in plan(ServeOptions(model=Path("hf:a/model"))) if s.name == "engine")
    assert str(folder) in engine.arguments
    catalog = tmp_path / "catalog.toml"
    catalog.write_text('[[models]]\nid = "m"\npath = "hf:a/model"\n')
    (services,) = plan_catalog(ServeOptions(catalog=catalog)).services.values()
    assert all(str(folder) in service.arguments for service in services)
