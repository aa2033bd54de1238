"""MCP server with three tools, which pages of a Tokenwire server may call.

python examples/mcp_server.py --page http://127.0.0.1:8000
"""

import argparse
import asyncio

import uvicorn
from mcp.server.mcpserver import MCPServer
from starlette.middleware.cors import CORSMiddleware

server = MCPServer("Example")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def divide(a: float, b: float) -> float:
    """Divide a number by another one."""
    return a / b


@server.tool()
async def wait(seconds: float) -> str:
    """Wait for a while."""
    await asyncio.sleep(seconds)
    return "The time is over."


def main() -> None:
    """Serve the tools at /mcp until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--page", required=True, help="origin of the pages that may call the tools")
    arguments = parser.parse_args()
    app = CORSMiddleware(
        server.streamable_http_app(),
        allow_origins=[arguments.page],
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["Mcp-Session-Id"],
    )
    uvicorn.run(app, host="127.0.0.1", port=arguments.port)


if __name__ == "__main__":
    main()
