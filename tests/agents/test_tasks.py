"""Coding agents finish a task: each calls a shell twice and reads what the commands print.

The engine's tokens come from a script. The services, templates, parsers and agents are real.
"""

import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from tests.agents.coding_agents import AGENTS, CodingAgent
from tests.agents.scripted_engine import ScriptedEngine, running_engine
from tests.agents.scripted_model import FORMS, Form, Script, make_checkpoint
from tests.services.shim import running_shim
from tests.stack import running_service

HERE = Path(__file__).parent
TASK = "Write the note"
INSTALL_SECONDS = 280
REGISTRY_IS_AWAY = ("ENOTFOUND", "EAI_AGAIN", "ETIMEDOUT", "ECONNREFUSED", "ENETUNREACH")


@dataclass(frozen=True, slots=True)
class ScriptedStack:
    """A shim and a tokenizer service in front of a scripted engine."""

    url: str
    form: Form
    engine: ScriptedEngine


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the agents from npm once; return the folder."""
    if shutil.which("npm") is None:
        pytest.skip("this machine has no Node.js")
    folder = tmp_path_factory.mktemp("agents")
    shutil.copy(HERE / "package.json", folder)
    install = ["npm", "install", "--no-audit", "--no-fund"]
    done = subprocess.run(
        install, cwd=folder, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False
    )
    if done.returncode != 0 and any(sign in done.stderr for sign in REGISTRY_IS_AWAY):
        pytest.skip("the npm registry can't be reached")
    assert done.returncode == 0, done.stderr
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=FORMS, ids=lambda f: f.name)
async def scripted(
    request: pytest.FixtureRequest, embedded_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ScriptedStack]:
    form: Form = request.param
    folder = tmp_path_factory.mktemp(form.name)
    model = make_checkpoint(form, embedded_model, folder / "scripted")
    engine = ScriptedEngine(model)  # type: ignore[abstract]  # the others are unimplemented
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        target = await enter(running_engine(engine))
        flags = ("--model", str(model), "--engine", target, "--metrics-port", "-1")
        tokenizer = await enter(running_service("tokenizer", *flags, log=folder / "tokenizer.log"))
        shim = await enter(running_shim("--tokenizer", tokenizer.target))
        yield ScriptedStack(shim.url, form, engine)


@pytest.mark.timeout(600)  # the first installs the agents
@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
async def test_agent_finishes_its_task(
    agent: CodingAgent, scripted: ScriptedStack, installed: Path, tmp_path: Path
) -> None:
    calls = [
        (agent.shell("echo 'seven*' > note.txt; echo made-$((6*7))"), "made-42"),
        (agent.shell("tr a-z A-Z < note.txt"), "SEVEN*"),
    ]
    script = Script(scripted.form, TASK, calls, "The note says SEVEN*.")
    scripted.engine.follow(script.turn)
    output = await agent.run(installed, tmp_path, scripted.url, TASK)
    assert (tmp_path / "work" / "note.txt").read_text() == "seven*\n"
    assert "The note says SEVEN*." in output
