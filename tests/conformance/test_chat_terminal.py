"""The interactive chat in a terminal, in front of the real stack."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pdfs import pdf
from tests.stack import Stack, is_busy, is_idle, left_early, running_service, watch_load
from tests.terminal import CTRL_C, CTRL_D, Terminal, terminal

PROMPT = r"^>>> "
TYPED = ">>> Send a message"
ENDLESS = ("--ignore-eos", "--seed", "1")


@pytest.fixture
def state(tmp_path: Path) -> str:
    """Folder of the history."""
    return str(tmp_path / "state")


@pytest.fixture
def chat(stack: Stack, state: str) -> Iterator[Terminal]:
    """A chat of short answers."""
    arguments = ("chat", "--target", stack.tokenizer, "--jobs", stack.jobs, "--max-tokens", "12")
    with terminal(
        *arguments, "--seed", "7", "--verbose", variables={"XDG_STATE_HOME": state}
    ) as running:
        running.wait_for(TYPED)
        yield running


def saved(chat: Terminal, file: Path) -> list[dict[str, str]]:
    """Return the messages of the conversation."""
    before = chat.text.count("\nSaved ")
    chat.enter(f"/save {file}")
    chat.wait_for("^Saved ", times=before + 1)
    messages: list[dict[str, str]] = json.loads(file.read_text())["messages"]
    return messages


def test_answers_continue_one_conversation(chat: Terminal, tmp_path: Path) -> None:
    chat.enter("Say hello.")
    chat.wait_for("first token after")
    chat.enter('"""one')
    chat.wait_for(r"^\.\.\.$")
    chat.enter('two"""')
    chat.wait_for("first token after", times=2)
    messages = saved(chat, tmp_path / "chat.json")
    assert [each["role"] for each in messages] == ["user", "assistant"] * 2
    assert messages[2]["content"] == "one\ntwo"
    assert messages[1]["content"]
    chat.press(CTRL_D)
    assert chat.wait_for_end() == 0


def test_commands_change_the_conversation(chat: Terminal, tmp_path: Path) -> None:
    chat.enter("/system Be brief.")
    chat.wait_for("^System message set")
    chat.enter("First question.")
    chat.wait_for("first token after")
    chat.enter("/regenerate")
    chat.wait_for("first token after", times=2)
    first = saved(chat, tmp_path / "first.json")
    assert [each["role"] for each in first] == ["system", "user", "assistant"]
    chat.enter("/clear")
    chat.wait_for("^The conversation is empty")
    chat.enter(f"/load {tmp_path / 'first.json'}")
    chat.wait_for("^Loaded 3 messages")
    chat.enter("Second question.")
    chat.wait_for("first token after", times=3)
    second = saved(chat, tmp_path / "second.json")
    assert second[:3] == first
    assert second[3]["content"] == "Second question."
    chat.enter("/bye")
    assert chat.wait_for_end() == 0


def test_wrong_commands_are_answered_with_a_sentence(chat: Terminal, stack: Stack) -> None:
    for typed, answer in (
        ("/sytem x", "Did you mean /system"),
        ("/set temprature 1", "Did you mean temperature"),
        ("/set temperature 7", "between 0 and 2"),
        ("/model nobody", "has no model nobody"),
        ("/model", re.escape(f"* {stack.model_id}")),
        ("/image /nowhere.png", "can't be read"),
        ("/save /etc/passwd", "exists: name another file"),
        ("/help", "/regenerate "),
    ):
        chat.enter(typed)
        chat.wait_for(answer)


def test_files_go_with_the_next_message(chat: Terminal, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("alpha beta")
    (tmp_path / "paper.pdf").write_bytes(pdf("gamma delta"))
    for name in ("notes.txt", "paper.pdf"):
        chat.enter(f"/file {tmp_path / name}")
        chat.wait_for(f"With the next message: .*{name}")
    chat.enter("What is in them?")
    chat.wait_for("first token after")
    [question, _] = saved(chat, tmp_path / "chat.json")
    assert "alpha beta" in question["content"]
    assert "gamma delta" in question["content"]
    assert question["content"].endswith("What is in them?")


async def test_ctrl_c_stops_the_answer_and_the_chat_goes_on(
    stack: Stack, state: str, tmp_path: Path
) -> None:
    command = ("chat", "--target", stack.tokenizer, *ENDLESS)
    with terminal(*command, variables={"XDG_STATE_HOME": state}) as chat:
        chat.wait_for(TYPED)
        async with left_early(stack.engine, 1900):
            chat.enter("Write a lot.")
            await watch_load(stack.engine, until=is_busy)
            chat.wait_for(r"Write a lot\.\n\S+ \S+")
            chat.press(CTRL_C)
            chat.wait_for(r"^Stopped\.")
        await watch_load(stack.engine, until=is_idle)
        [question, answer] = saved(chat, tmp_path / "chat.json")
        assert question["content"] == "Write a lot."
        assert answer["content"]
        chat.press(CTRL_C)
        chat.wait_for(f"^Ctrl-C again leaves.*\n{TYPED}")
        chat.press(CTRL_C)
        assert chat.wait_for_end() == 0


async def test_server_that_goes_away_costs_one_sentence(
    stack: Stack, state: str, tmp_path: Path
) -> None:
    flags = ("--model", str(stack.model), "--engine", stack.engine)
    async with running_service("tokenizer", *flags, log=tmp_path / "log") as tokenizer:
        command = ("chat", "--target", tokenizer.target, *ENDLESS)
        with terminal(*command, variables={"XDG_STATE_HOME": state}) as chat:
            chat.wait_for(TYPED)
            chat.enter("Write a lot.")
            chat.wait_for(r"Write a lot\.\n\S+ \S+")
            tokenizer.process.kill()
            chat.wait_for(r"^(No server answers at|The server at) ")
            chat.enter("Are you there?")
            chat.wait_for(r"^No server answers at ")
            assert saved(chat, tmp_path / "chat.json")[-1]["role"] == "assistant"
            chat.press(CTRL_D)
            assert chat.wait_for_end() == 0


def test_input_history_is_kept_between_chats(stack: Stack, state: str) -> None:
    command = ("chat", "--target", stack.tokenizer, "--max-tokens", "2")
    with terminal(*command, variables={"XDG_STATE_HOME": state}) as chat:
        chat.wait_for(TYPED)
        chat.enter("/set seed 4711")
        chat.press(CTRL_D)
        chat.wait_for_end()
    with terminal(*command, variables={"XDG_STATE_HOME": state}) as chat:
        chat.wait_for(TYPED)
        chat.press("\x1b[A")
        chat.wait_for(r"^>>> /set seed 4711")
    history = Path(state, "tokenwire", "chat_history")
    assert history.stat().st_mode & 0o777 == 0o600


def test_narrow_terminal_without_colours(stack: Stack, state: str) -> None:
    command = ("chat", "--target", stack.tokenizer, "--max-tokens", "40", "--verbose")
    with terminal(
        *command, columns=24, variables={"NO_COLOR": "1", "XDG_STATE_HOME": state}
    ) as chat:
        chat.wait_for(">>> ")
        chat.enter("日本語 text")
        chat.wait_for("first token")
        assert not re.search(r"\x1b\[[0-9;]*[34][0-9](;[0-9]+)*m", chat.raw)


def test_piped_message_is_answered_as_plain_text(stack: Stack) -> None:
    command = [sys.executable, "-m", "tokenwire", "chat", "--target", stack.tokenizer]
    done = subprocess.run(
        [*command, "--max-tokens", "8"],
        input="Say\nhello.",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "\x1b" not in done.stdout


def test_chat_without_its_packages_names_them() -> None:
    with terminal("chat", without="rich") as chat:
        chat.wait_for("^tokenwire: A chat in the terminal needs rich: ")
        assert chat.wait_for_end() == 2
        assert "-m pip install" in chat.raw
