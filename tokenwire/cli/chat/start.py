"""Start of a chat by the command line's options."""

import argparse
from collections.abc import Mapping
from typing import Any

from tokenwire.cli.arguments import connected, key_of, tls_of
from tokenwire.cli.chat.chat_server import ModelError, TargetServer
from tokenwire.cli.chat.chat_settings import ChatSettings
from tokenwire.cli.chat.interactive import open_state, run_chat
from tokenwire.cli.chat.pdf_reader import PdfReader
from tokenwire.cli.output import print_error

__all__ = ["chat_at_target"]

_JOBS_PORT = 50054


async def chat_at_target(options: argparse.Namespace, request: Mapping[str, Any]) -> int:
    """Chat with the tokenizer service of --target; return the exit code."""
    values = dict(request)
    settings = ChatSettings(values, options.verbose)
    tls, model = tls_of(options), values.pop("model", "")
    jobs = options.jobs or f"{options.target.rpartition(':')[0]}:{_JOBS_PORT}"
    pdfs = PdfReader(jobs, tls, key_of(options), options.plaintext)
    async with connected(options) as client:
        server = TargetServer(client, options.target, tls)
        try:
            state = await open_state(server, model, pdfs, settings)
        except ModelError as error:
            print_error(str(error))
            return 1
        state.conversation.system = options.system or ""
        await run_chat(state)
    return 0
