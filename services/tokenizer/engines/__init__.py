"""The engines behind the tokenizer service, and the choice between them."""
