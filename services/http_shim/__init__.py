"""The edge: the OpenAI API in JSON and SSE, in front of the text-level services."""
