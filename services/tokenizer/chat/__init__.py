"""Chats: from a conversation to the prompt, and from generated text to the message."""
