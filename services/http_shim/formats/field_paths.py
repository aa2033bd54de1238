"""Paths of a request's fields, as errors of the tokenizer service have them."""

__all__ = ["within_input"]


def within_input(path: str) -> str:
    """Return a path without its input: "conversation.messages[0].role" is "messages[0].role".

    The prompts are "prompts", and "prompts.suffix" is "suffix". Other paths stay.
    """
    if path.startswith("prompts.items"):
        return "prompts" + path.removeprefix("prompts.items")
    return path.removeprefix("prompts.").removeprefix("conversation.")
