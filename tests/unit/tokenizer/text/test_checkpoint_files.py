"""Chat templates are found wherever a release of transformers saved them."""

import json
from pathlib import Path

import pytest

from services.common.settings import StartupError
from services.tokenizer.text.checkpoint_files import read_chat_templates


def test_template_of_a_processor_is_read(tmp_path: Path) -> None:
    """LLaVA, SmolVLM and Qwen2.5-VL have theirs in chat_template.json alone."""
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "of the processor"}))
    found = read_chat_templates(tmp_path, {"chat_template": "of the tokenizer"})
    assert found == {"default": "of the processor"}
    (tmp_path / "chat_template.jinja").write_text("newer")
    assert read_chat_templates(tmp_path, {}) == {"default": "newer"}


@pytest.mark.parametrize("entry", [{"name": "default"}, {"template": "x"}, "x", None], ids=str)
def test_malformed_list_of_templates_is_refused(entry: object, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="a name and a template"):
        read_chat_templates(tmp_path, {"chat_template": [entry]})
