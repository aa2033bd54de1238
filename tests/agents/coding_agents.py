"""Codex, Claude Code and opencode: their settings for a server, and their runs."""

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.agents.scripted_model import Call

__all__ = ["AGENTS", "CodingAgent"]

_RUN_SECONDS = 240
_MODEL = "scripted"


@dataclass(frozen=True, slots=True)
class CodingAgent:
    """An agent's command, its settings, and its tool that runs shell commands."""

    name: str
    command: tuple[str, ...]
    """Program in node_modules/.bin, and its arguments; the task follows"""
    tool: str
    key: str
    """Argument of the tool that holds the shell command"""
    configure: Callable[[Path, str], Mapping[str, str]]
    """Writes settings for a server's URL into a home folder; returns the environment"""

    def shell(self, command: str) -> Call:
        """Return the call that runs a shell command."""
        described = {} if self.name == "codex" else {"description": "Runs a command"}
        return Call(self.tool, {self.key: command, **described})

    async def run(self, installed: Path, folder: Path, url: str, task: str) -> str:
        """Run a task in a new folder; return the output. Raises AssertionError if it fails."""
        home, work = folder / "home", folder / "work"
        home.mkdir(parents=True)
        work.mkdir()
        program, *arguments = self.command
        process = await asyncio.create_subprocess_exec(
            str(installed / "node_modules" / ".bin" / program),
            *arguments,
            task,
            cwd=work,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(home),
                "XDG_CACHE_HOME": str(installed / "cache"),  # of packages that an agent installs
                **self.configure(home, url),
            },
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), _RUN_SECONDS)
        finally:
            if process.returncode is None:
                process.kill()
        text = output.decode()
        assert process.returncode == 0, text
        return text


def _configure_codex(home: Path, url: str) -> Mapping[str, str]:
    provider = {"name": '"tokenwire"', "base_url": f'"{url}/v1"', "wire_api": '"responses"'}
    lines = [f'model = "{_MODEL}"', 'model_provider = "tokenwire"']
    lines += ["[model_providers.tokenwire]", *(f"{key} = {each}" for key, each in provider.items())]
    (home / "config.toml").write_text("\n".join(lines))
    return {"CODEX_HOME": str(home)}


def _configure_claude(home: Path, url: str) -> Mapping[str, str]:
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": _MODEL,
        "ANTHROPIC_SMALL_FAST_MODEL": _MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }


def _configure_opencode(home: Path, url: str) -> Mapping[str, str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "tokenwire",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {_MODEL: {"name": _MODEL}},
    }
    settings = {"provider": {"tokenwire": provider}, "autoupdate": False, "share": "disabled"}
    folder = home / ".config" / "opencode"
    folder.mkdir(parents=True)
    (folder / "opencode.json").write_text(json.dumps(settings))
    return {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"}


AGENTS = (
    CodingAgent(
        "codex",
        ("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        "exec_command",
        "cmd",
        _configure_codex,
    ),
    CodingAgent(
        "claude-code",
        ("claude", "--allowedTools", "Bash", "-p"),
        "Bash",
        "command",
        _configure_claude,
    ),
    CodingAgent(
        "opencode",
        ("opencode", "run", "-m", f"tokenwire/{_MODEL}"),
        "bash",
        "command",
        _configure_opencode,
    ),
)
