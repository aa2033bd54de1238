"""Façade for gateways that speak vLLM's gRPC: token ids in, token ids out."""
