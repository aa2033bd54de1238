"""Tests of the chat's commands over files, which need no server."""

import os
import resource
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from tokenwire.cli.chat.attachments import AttachmentError, Attachments
from tokenwire.cli.chat.chat_settings import ChatSettings
from tokenwire.cli.chat.chat_state import ChatState
from tokenwire.cli.chat.demand_server import DemandServer
from tokenwire.cli.chat.slash_commands import run_command
from tokenwire.messages import Message


async def no_pdfs(data: bytes, name: str) -> str:
    raise AttachmentError("no PDFs here")


@pytest_asyncio.fixture
async def state() -> AsyncIterator[ChatState]:
    server = DemandServer("127.0.0.1:1", "http://127.0.0.1:2")
    yield ChatState(server, "m", Attachments(no_pdfs), ChatSettings())
    await server.aclose()


@contextmanager
def full_disk() -> Iterator[None]:
    """Let no file grow beyond 1 KiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("command", ["/save", "/load", "/file", "/image"])
@pytest.mark.parametrize("path", ["x" * 300, "~no-such-user/chat.json", "/dev/zero"])
async def test_unusable_path_is_a_sentence(
    state: ChatState, capsys: pytest.CaptureFixture[str], command: str, path: str
) -> None:
    """The chat would end, and the conversation with it; /dev/zero would fill the memory."""
    await run_command(state, f"{command} {path}")
    assert path in capsys.readouterr().out


async def test_pipe_without_a_writer_does_not_block_the_chat(
    state: ChatState, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for command in ("/load", "/file"):
        await run_command(state, f"{command} {tmp_path / 'pipe'}")
        assert "no regular file" in capsys.readouterr().out


async def test_full_disk_leaves_the_saved_conversation(
    state: ChatState, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The user would lose the only copy of a long conversation."""
    path = tmp_path / "chat.json"
    state.conversation.messages.append(Message("user", "hello"))
    await run_command(state, f"/save {path}")
    saved = path.read_text()
    state.conversation.messages.append(Message("assistant", "x" * 4096))
    with full_disk():
        await run_command(state, f"/save {path}")
    assert "File too large" in capsys.readouterr().out
    assert path.read_text() == saved
    assert os.listdir(tmp_path) == ["chat.json"]
