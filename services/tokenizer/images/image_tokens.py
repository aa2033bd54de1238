"""Special tokens for images in a checkpoint's vocabulary."""

from collections.abc import Mapping

from services.tokenizer.text.section import Section, SettingsError

__all__ = ["ImageTokens"]


class ImageTokens:
    """Finder of tokens by the ids of config.json, or by their usual texts."""

    def __init__(self, config: Section, ids: Mapping[str, int]) -> None:
        """ids: ids of the vocabulary by text."""
        self._config = config
        self._ids = ids
        self._texts = {index: text for text, index in ids.items()}

    def text(self, usual: str, *keys: str) -> str:
        """Return the text of the token that the first of config.json's keys names, or else `usual`.

        Raises SettingsError if the vocabulary does not have it.
        """
        for key in keys:
            token = self._config.count(key, least=0)
            if token is not None and token in self._texts:
                return self._texts[token]
        if usual not in self._ids:
            raise SettingsError(f"the tokenizer has no token {usual}.")
        return usual

    def id(self, text: str) -> int:
        """Return the id of a token that `text` returned."""
        return self._ids[text]
