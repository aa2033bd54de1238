"""The commands `list`, `show` and `rm`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.common.model_files.hub_cache import add_repository, gguf_bytes


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    add_repository(tmp_path / "hf" / "hub", "a/b", {"m-Q8_0.gguf": gguf_bytes(tmp_path, 512)})
    return tmp_path


def tokenwire(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tokenwire", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_list_has_a_row_for_each_model(home: Path) -> None:
    heads, row = tokenwire("list").stdout.splitlines()
    assert heads.split() == ["NAME", "SIZE", "QUANTISATION", "CONTEXT", "LAST", "USE"]
    assert row.split()[0] == "a/b:Q8_0"
    (model,) = json.loads(tokenwire("list", "--json").stdout)["models"]
    assert (model["name"], model["context"], model["last_used"]) == ("a/b:Q8_0", 512, None)


def test_list_of_short_names_has_their_size_and_licence() -> None:
    shown = tokenwire("list", "--available").stdout
    assert "smollm2:1.7b" in shown
    models = json.loads(tokenwire("list", "--available", "--json").stdout)["models"]
    assert models[0]["name"] == "smollm2"
    assert models[0]["licence"] == "Apache-2.0"
    assert models[0]["download_bytes"] > 10**8


def test_remove_needs_consent(home: Path) -> None:
    refused = tokenwire("rm", "a/b")
    assert refused.returncode == 2
    assert "--yes removes it" in refused.stderr
    assert tokenwire("rm", "a/b:Q8_0", "--yes").stdout.startswith("a/b:Q8_0 is removed")
    assert tokenwire("rm", "a/b:Q8_0", "--yes").returncode == 1
    assert "no models yet" in tokenwire("list").stderr


def test_show_of_a_model_has_its_facts_without_torch(embedded_model: Path) -> None:
    """A user decides by the memory whether a model fits; a command must not take seconds."""
    program = (
        "import sys; from tokenwire.cli import main\n"
        "try: main(['show', sys.argv[1], '--json'])\n"
        "finally: assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", program, str(embedded_model)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    facts = json.loads(result.stdout)
    assert facts["parameters"] == 6_032_128
    assert facts["context"] == 2048
    config = json.loads((embedded_model / "config.json").read_text())
    assert facts["layers"] == config["num_hidden_layers"]
    assert facts["width"] == config["hidden_size"]
    assert facts["vocabulary"] == config["vocab_size"]
    assert facts["quantisation"] == "BF16"
    assert facts["bytes_by_type"] == {"BF16": 2 * facts["parameters"]}
    assert facts["bytes"] == (embedded_model / "model.safetensors").stat().st_size
    assert facts["licence"] == "apache-2.0"
    assert facts["tools"] == {"shown_by_template": True, "format": "hermes"}
    assert facts["memory_bytes"]["int4"] < facts["memory_bytes"]["int8"]
    assert facts["gpu_memory_bytes"]["fp8"] < facts["gpu_memory_bytes"]["full"]
    assert facts["cache_bytes"] > 0
    assert "AssertionError" not in result.stderr


def test_show_of_a_model_that_is_not_here_names_the_command(home: Path) -> None:
    result = tokenwire("show", "smollm2")
    assert result.returncode == 1
    assert "`tokenwire pull smollm2` downloads it" in result.stderr
    assert os.listdir(home / "hf" / "hub") == ["models--a--b"]
