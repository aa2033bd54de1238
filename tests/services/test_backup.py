"""Backup of the stores by the page about upgrades, while the jobs service uses them."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from tests.services.shim import Shim, shim_with_jobs
from tests.services.test_batches import answers, ended, line, sdk, started
from tests.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "upgrading.md"


def block(language: str, begin: str) -> str:
    """Return the page's block of a language that has a text."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    [found] = [str(each) for each in blocks if begin in each]
    return found


async def run(folder: Path, *command: str) -> None:
    done = await asyncio.to_thread(
        subprocess.run, command, cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def flags(folder: Path) -> tuple[str, ...]:
    (folder / "files").mkdir(exist_ok=True)
    store = ("--response-store", str(folder / "responses.sqlite"))
    return ("--file-folder", str(folder / "files"), *store)


async def response(client: AsyncOpenAI, text: str) -> str:
    made = await client.responses.create(model="default", input=text, max_output_tokens=4)
    return made.id


async def test_restored_backup_has_what_was_kept_before_it(stack: Stack, tmp_path: Path) -> None:
    """Rows that stand in the -wal file alone are the newest: a plain copy would lack them."""
    backup = [sys.executable, "-c", block("python", "def copy_contents")]
    restore = ["bash", "-euo", "pipefail", "-c", block("sh", "mv ")]

    async def kept(shim: Shim) -> tuple[str, str, str]:
        async with sdk(shim) as client:
            batch = await ended(client, await started(client, [line("a"), line("b")]))
            assert batch.output_file_id is not None
            return batch.id, batch.output_file_id, await response(client, "Hello!")

    async with shim_with_jobs(stack.tokenizer, *flags(tmp_path)) as (shim, _):
        batch_id, output, response_id = await kept(shim)
        await run(tmp_path, *backup)
        later_batch, _, later_response = await kept(shim)
    await run(tmp_path, *restore)
    async with shim_with_jobs(stack.tokenizer, *flags(tmp_path)) as (shim, _), sdk(shim) as client:
        assert (await client.batches.retrieve(batch_id)).output_file_id == output
        assert (await answers(client, output)).keys() == {"a", "b"}
        assert (await client.responses.retrieve(response_id)).id == response_id
        known = {each.id for each in (await client.batches.list()).data}
        assert later_batch not in known
        assert later_response != response_id
