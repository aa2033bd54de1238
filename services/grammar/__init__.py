"""The grammar service: structured output as masks over the vocabulary."""
