"""Endpoints of Ollama's API, served with --ollama."""
