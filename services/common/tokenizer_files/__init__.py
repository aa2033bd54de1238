"""tokenizer.json, made from the other files in which tokenizers come."""
