"""Text of a model, made safe for a terminal."""

__all__ = ["visible"]

_CONTROL_PICTURES = 0x2400
"""Code point of the picture of U+0000; the pictures of the other 31 controls follow it"""
_PICTURES: dict[int, str | None] = {
    **{code: chr(_CONTROL_PICTURES + code) for code in range(0x20)},
    0x7F: "\u2421",
    **dict.fromkeys(range(0x80, 0xA0), "\ufffd"),  # C1: terminals take some as escape sequences
    # directions that would show a text in another order than it has
    **dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A)), None),
}
del _PICTURES[ord("\n")], _PICTURES[ord("\t")]
_PICTURES[ord("\r")] = None


def visible(text: str) -> str:
    """Return the text with a picture in place of each control character but newline and tab.

    An escape sequence then shows as characters, and a terminal does not obey it.
    """
    return text.translate(_PICTURES)
