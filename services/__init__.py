"""The four services: tokenizer, engine, grammar and http_shim. None imports another's package."""
