"""Models on transformers' own modules, with our attention, products and cache (--model-code)."""
