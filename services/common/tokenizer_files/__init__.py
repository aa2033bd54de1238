"""tokenizer.json, made from tokenizers in other formats."""
