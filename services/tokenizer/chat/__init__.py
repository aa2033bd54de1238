"""Chats: a conversation becomes a prompt, generated text becomes a message."""
