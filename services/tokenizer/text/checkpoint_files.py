"""Files of a checkpoint: text, JSON, chat templates."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common.settings import StartupError

__all__ = ["DEFAULT_TEMPLATE", "read_chat_templates", "read_json", "read_text"]

DEFAULT_TEMPLATE = "default"


def read_text(path: Path) -> str | None:
    """Return the text of a file; None if it does not exist. Raises StartupError."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"{path} can't be read: {error}.") from None


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file; {} if the file does not exist. Raises StartupError."""
    text = read_text(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise StartupError(f"{path} is not JSON: {error}.") from None
    if not isinstance(value, dict):
        raise StartupError(f"{path} is not a JSON object.")
    return value


def read_chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates (Jinja) by name. As in transformers, files override `config`.

    Processors of vision-language models saved their template as chat_template.json, an object.
    """
    templates: dict[str, str] = {}
    processor = read_json(directory / "chat_template.json")
    configured = processor.get("chat_template") or config.get("chat_template")
    if isinstance(configured, str):
        templates[DEFAULT_TEMPLATE] = configured
    elif isinstance(configured, list):
        templates |= dict(_named_template(directory, entry) for entry in configured)
    further = sorted((directory / "additional_chat_templates").glob("*.jinja"))
    for path in (directory / "chat_template.jinja", *further):
        if (text := read_text(path)) is not None:
            name = DEFAULT_TEMPLATE if path.stem == "chat_template" else path.stem
            templates[name] = text
    return {name: text for name, text in templates.items() if text}


def _named_template(directory: Path, entry: object) -> tuple[str, str]:
    match entry:
        case {"name": str(name), "template": str(template)}:
            return name, template
    raise StartupError(f"{directory}: each entry of chat_template must have a name and a template.")
