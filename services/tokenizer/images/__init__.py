"""Images in prompts: the tokens that stand for them, from their sizes alone."""
