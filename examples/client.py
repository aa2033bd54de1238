"""Text and tokens with Tokenwire's asyncio client."""

import asyncio
import os

from tokenwire.client import Client, EngineClient


async def main() -> None:
    async with (
        Client(os.environ.get("TOKENIZER", "127.0.0.1:50051")) as client,
        EngineClient(os.environ.get("ENGINE", "127.0.0.1:50052")) as engine,
    ):
        async with client.stream("def add(a, b):", max_tokens=16, temperature=0) as stream:
            async for delta in stream:
                print(delta.text, end="", flush=True)
        print()

        prompt = await client.encode("def add(a, b):")
        generation = await engine.generate(prompt.ids, max_tokens=16, temperature=0)
        print(await client.decode(generation.token_ids))


asyncio.run(main())
