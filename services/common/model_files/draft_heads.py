"""Draft heads, which draft for a model and can't be served by themselves."""

__all__ = ["is_assistant_name", "is_draft_head", "is_eagle_name"]


def is_draft_head(architecture: str) -> bool:
    """Return whether an architecture of a config.json can only draft for another model."""
    return is_eagle_name(architecture) or is_assistant_name(architecture)


def is_eagle_name(architecture: str) -> bool:
    """Return whether an architecture is that of an EAGLE-3 head."""
    return "eagle3" in architecture.lower()


def is_assistant_name(architecture: str) -> bool:
    """Return whether an architecture is that of an assistant of Gemma 4."""
    return architecture in ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")
