"""Embeddings of texts, and scores of pairs of texts."""
