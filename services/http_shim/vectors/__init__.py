"""Vectors of texts: embeddings, rankings, scores, classes and pooled states."""
