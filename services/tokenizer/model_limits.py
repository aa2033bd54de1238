"""Limits and capabilities of the served model."""

from collections.abc import Collection
from dataclasses import dataclass

from tokenwire.pb.engine.v1 import engine_pb2

__all__ = ["ModelLimits"]


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The engine's model and limits, lowered to this service's settings. Lengths are in tokens."""

    model: str
    """Name of the model, or of its adapter"""
    system_fingerprint: str
    context_length: int
    vocabulary_size: int
    eos_ids: Collection[int]
    capabilities: Collection["engine_pb2.Capability.ValueType"]
    max_logprobs: int
    max_chat_logprobs: int
    max_sequences: int
    max_stop_strings: int
    appends_suffix: bool
    """True if a suffix is appended, rather than refused, if the model can't infill"""
    model_code: str = ""
    """Code that computes the model, "native" or "transformers"; empty = not known"""
    vector_width: int = 0
    """Width of an embedding, or number of labels that a text is scored for; 0 = neither"""
    token_width: int = 0
    """Width of a token's vector; 0 = the model makes no vectors"""
    vectors_are_scores: bool = False
    vectors_are_normalized: bool = False
    takes_pairs: bool = False
    """True if the model tells the texts of a pair apart"""
    weighs_tokens: bool = False
    """True if the model gives each token a weight, and token vectors other than its text vectors"""
    hides_ends: bool = False
    """True if the model can hide tokens at the end of a prompt from all tokens"""
    only_embeds: bool = False
    """True if the model does not generate"""
    adapter: str = ""
    """Fingerprint of the adapter; empty = the model alone"""

    @property
    def only_tokens_have_vectors(self) -> bool:
        """True if pairs of texts are scored by the vectors of their tokens (ColBERT)."""
        return self.token_width > 0 and not self.vector_width
