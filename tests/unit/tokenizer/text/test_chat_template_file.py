"""A chat template of the operator's own."""

from pathlib import Path

import pytest

from services.common.settings import StartupError
from services.tokenizer.text.vocabulary import Vocabulary
from tokenwire.serving.serve_options import ServeOptions
from tokenwire.serving.stack_layout import plan


def test_file_replaces_the_template_of_the_checkpoint(tmp_path: Path, embedded_model: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[0].content }}")
    assert Vocabulary(embedded_model).chat_template
    vocabulary = Vocabulary(embedded_model, chat_template=file)
    assert vocabulary.chat_template == "{{ messages[0].content }}"


@pytest.mark.parametrize("content", [None, ""])
def test_missing_or_empty_file_is_refused(
    tmp_path: Path, embedded_model: Path, content: str | None
) -> None:
    file = tmp_path / "template.jinja"
    if content is not None:
        file.write_text(content)
    with pytest.raises(StartupError, match="missing or empty"):
        Vocabulary(embedded_model, chat_template=file)


def test_serve_gives_the_file_to_the_tokenizer_service(tmp_path: Path) -> None:
    services = plan(ServeOptions(chat_template=tmp_path / "template.jinja"))
    given = {service.name for service in services if "--chat-template" in service.arguments}
    assert given == {"tokenizer"}
