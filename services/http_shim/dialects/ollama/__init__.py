"""Chats and generation, as in Ollama's API."""
