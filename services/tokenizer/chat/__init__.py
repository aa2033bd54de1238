"""Chats: prompts from conversations, and messages from generated text."""
