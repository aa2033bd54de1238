"""Blocks that only Anthropic's servers make or read, in histories that come from there.

They are left out of the prompt. What the assistant said about them stays.
"""

from typing import TypeAlias

from services.http_shim.formats.request_bodies import LeftOut

__all__ = ["ServerBlock", "ServerResultBlock"]


class _ServerBlock(LeftOut, tag_field="type"):
    pass


class ServerToolUseBlock(_ServerBlock, tag="server_tool_use"):
    """A call of a tool that a server ran."""


class WebSearchResultBlock(_ServerBlock, tag="web_search_tool_result"):
    """The answer of a server's tool."""


class WebFetchResultBlock(_ServerBlock, tag="web_fetch_tool_result"):
    """The answer of a server's tool."""


class CodeExecutionResultBlock(_ServerBlock, tag="code_execution_tool_result"):
    """The answer of a server's tool."""


class BashExecutionResultBlock(_ServerBlock, tag="bash_code_execution_tool_result"):
    """The answer of a server's tool."""


class TextEditorResultBlock(_ServerBlock, tag="text_editor_code_execution_tool_result"):
    """The answer of a server's tool."""


class ToolSearchResultBlock(_ServerBlock, tag="tool_search_tool_result"):
    """The answer of a server's tool."""


class AdvisorResultBlock(_ServerBlock, tag="advisor_tool_result"):
    """The answer of a server's tool."""


class McpToolUseBlock(_ServerBlock, tag="mcp_tool_use"):
    """A call of an MCP server's tool."""


class McpToolResultBlock(_ServerBlock, tag="mcp_tool_result"):
    """The answer of an MCP server's tool."""


class McpToolListingBlock(_ServerBlock, tag="mcp_tool_listing"):
    """The tools of an MCP server."""


class ContainerUploadBlock(_ServerBlock, tag="container_upload"):
    """A file for a server's container."""


class ToolAdditionBlock(_ServerBlock, tag="tool_addition"):
    """A tool that is offered from here on."""


class ToolRemovalBlock(_ServerBlock, tag="tool_removal"):
    """A tool that is offered no longer."""


class FallbackBlock(_ServerBlock, tag="fallback"):
    """A change of the model."""


class ToolReferenceBlock(_ServerBlock, tag="tool_reference"):
    """A tool that a search found."""


class BrowserStateBlock(_ServerBlock, tag="browser_state"):
    """The state of a browser."""


ServerResultBlock: TypeAlias = ToolReferenceBlock | BrowserStateBlock
"""Blocks of a tool's result"""
ServerBlock: TypeAlias = (
    ServerToolUseBlock
    | WebSearchResultBlock
    | WebFetchResultBlock
    | CodeExecutionResultBlock
    | BashExecutionResultBlock
    | TextEditorResultBlock
    | ToolSearchResultBlock
    | AdvisorResultBlock
    | McpToolUseBlock
    | McpToolResultBlock
    | McpToolListingBlock
    | ContainerUploadBlock
    | ToolAdditionBlock
    | ToolRemovalBlock
    | FallbackBlock
)
"""Blocks of a message"""
