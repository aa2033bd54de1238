"""Tests of a chat's conversation, settings, files and visible text."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from tokenwire.cli.chat.attachments import AttachmentError, Attachments
from tokenwire.cli.chat.chat_settings import ChatSettings, SettingError
from tokenwire.cli.chat.conversation import (
    Conversation,
    ConversationError,
    read_messages,
    write_messages,
)
from tokenwire.cli.chat.prompt_line import LastingHistory, PromptLine
from tokenwire.cli.visible_text import visible
from tokenwire.messages import Message, ToolCall

PNG = b"\x89PNG\r\n\x1a\n..."
MESSAGES = [
    Message("system", "Be brief."),
    Message("user", "What is this?", images=[PNG]),
    Message("assistant", None, [ToolCall("1", "look", "{}")], reasoning="A picture."),
    Message("tool", "a cat", tool_call_id="1"),
    Message("assistant", "A cat."),
]


async def no_pdfs(data: bytes, name: str) -> str:
    raise AttachmentError("no PDFs here")


@given(st.text())
def test_terminal_gets_no_control_characters(text: str) -> None:
    """A model may be told to write sequences that change colours, titles or the clipboard."""
    shown = visible(text)
    assert not any(ord(each) < 32 and each not in "\n\t" for each in shown)
    assert not any(0x7F <= ord(each) < 0xA0 for each in shown)


def test_escape_sequence_shows_as_characters() -> None:
    assert visible("\x1b[31mred\x9b0m\r\n日本\té") == "␛[31mred�0m\n日本\té"


def test_saved_conversation_is_the_same_when_loaded() -> None:
    text = json.dumps({"model": "m", "messages": write_messages(MESSAGES)})
    loaded = read_messages(text)
    assert [message.write() for message in loaded] == [message.write() for message in MESSAGES]
    conversation = Conversation()
    conversation.replace_all(loaded)
    assert conversation.system == "Be brief."
    assert len(conversation.whole) == len(MESSAGES)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not JSON"),
        ("{}", "neither a list"),
        ('[{"role": "robot", "content": "x"}]', "has no role"),
        ('[{"role": "user", "content": [{"type": "audio"}]}]', "no text and no image"),
        ('[{"role": "user", "content": 1}]', "must be a text"),
        ("[" * 100_000, "not JSON"),
        ('[{"role": "assistant", "content": "x", "tool_calls": 5}]', "must be a list"),
    ],
)
def test_file_without_a_conversation_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConversationError, match=problem):
        read_messages(text)


def test_regenerate_drops_the_last_question_and_its_answer() -> None:
    conversation = Conversation(messages=list(MESSAGES[1:]))
    question = conversation.drop_answer()
    assert question == MESSAGES[1]
    assert conversation.messages == []
    assert conversation.drop_answer() is None


def test_settings_are_checked_when_they_are_typed() -> None:
    settings = ChatSettings()
    settings.set("temperature", "0.5")
    settings.set("stop", '"END" "a\\nb"')
    settings.set("verbose", "on")
    assert settings.request == {"temperature": 0.5, "stop": ["END", "a\nb"]}
    assert settings.verbose
    settings.set("temperature", "default")
    assert "temperature" not in settings.request
    with pytest.raises(SettingError, match="Did you mean top_p"):
        settings.set("topp", "1")
    with pytest.raises(SettingError, match="between 0 and 1"):
        settings.set("top_p", "2")


async def test_files_go_with_the_next_message_alone(tmp_path: Path) -> None:
    attachments = Attachments(no_pdfs)
    (tmp_path / "notes.md").write_text("```\ncode\n```\n")
    (tmp_path / "photo.png").write_bytes(PNG)
    await attachments.add_file(tmp_path / "notes.md")
    attachments.add_image(tmp_path / "photo.png")
    message = attachments.take("Read this.")
    assert message.content == "File notes.md:\n\n````\n```\ncode\n```\n````\n\nRead this."
    assert message.images == (PNG,)
    assert attachments.take("And now?") == Message("user", "And now?")


async def test_unfit_files_are_refused_with_a_sentence(tmp_path: Path) -> None:
    attachments = Attachments(no_pdfs)
    for name, data, problem in (
        ("a.bin", b"\xff\x00", "neither a PDF nor text"),
        ("a.png", PNG, "use /image"),
        ("a.pdf", b"%PDF-1.7", "no PDFs here"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(AttachmentError, match=problem):
            await attachments.add_file(tmp_path / name)
    with pytest.raises(AttachmentError, match="no PNG"):
        attachments.add_image(tmp_path / "a.bin")
    with pytest.raises(AttachmentError, match="No such file"):
        attachments.add_image(tmp_path / "missing.png")
    with pytest.raises(AttachmentError, match="is a directory"):
        await attachments.add_file(tmp_path)


def test_history_that_can_not_be_written_stays_in_memory(tmp_path: Path) -> None:
    """On a full disk, each message would show a traceback."""
    history = LastingHistory(str(tmp_path))
    history.append_string("hello")
    assert history.get_strings() == ["hello"]


async def test_bytes_that_are_not_utf_8_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No message can hold them, so each later request of the chat would fail."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with create_pipe_input() as keys, create_app_session(keys, DummyOutput()):
        keys.send_bytes(b"caf\xe9 \xc3\xa9\r")
        assert await PromptLine({}).read() == "caf\ufffd é"
