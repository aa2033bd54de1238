"""Chats, as in OpenAI's API."""
