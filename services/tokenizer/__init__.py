"""Tokenizer service: encoding, decoding, completions and chats in text, in front of an engine."""
