"""Façade for gateways that use vLLM's gRPC services: prompts and answers are token ids."""
