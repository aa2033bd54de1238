"""Tokenwire: a language-model server and its client."""
