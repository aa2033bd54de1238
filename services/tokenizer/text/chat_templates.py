"""Chat templates: where a checkpoint keeps them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.tokenizer.text.checkpoint_files import read_text

__all__ = ["DEFAULT_TEMPLATE", "read_chat_templates"]

DEFAULT_TEMPLATE = "default"


def read_chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The templates (Jinja) by name, as transformers finds them: files win over the configuration
    of the tokenizer. Raises StartupError for a file that can't be read."""
    templates: dict[str, str] = {}
    configured = config.get("chat_template")
    if isinstance(configured, str):
        templates[DEFAULT_TEMPLATE] = configured
    elif isinstance(configured, list):
        templates |= {str(entry["name"]): str(entry["template"]) for entry in configured}
    further = sorted((directory / "additional_chat_templates").glob("*.jinja"))
    for path in (directory / "chat_template.jinja", *further):
        if (text := read_text(path)) is not None:
            name = DEFAULT_TEMPLATE if path.stem == "chat_template" else path.stem
            templates[name] = text
    return {name: text for name, text in templates.items() if text}
