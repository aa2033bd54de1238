"""Load generator: requests to a server with an OpenAI-compatible API, and their figures."""
