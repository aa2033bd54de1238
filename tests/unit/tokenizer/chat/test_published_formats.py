"""Chat templates of published models: what they write for an answer is read back.

TOKENWIRE_CHAT_TEMPLATES names their folder, as for `test_published_templates`.
"""

import os
import random
import re
from pathlib import Path

import pytest

from services.tokenizer.chat.answer.derivation import CALLS, CONTENT
from tests.unit.tokenizer.chat.test_derived_formats import CALLS as TYPED_CALLS
from tests.unit.tokenizer.chat.test_derived_formats import message, started
from tokenwire.errors import ServiceError

_FOLDER = os.environ.get("TOKENWIRE_CHAT_TEMPLATES", "")
_SOURCES = {
    file.stem: file.read_text()
    for file in (sorted(Path(_FOLDER).glob("*.jinja")) if _FOLDER else ())
}
_TOKEN = re.compile(r"<[|｜][^<>\s'\"{}]+>|<[a-z_]+\|>|\[/?[A-Z_]{3,}\]|\]<\]minimax\[>\[")
# they write tools and no calls, or need more than messages and tools
_SHOW_NO_CALLS = {
    "CohereForAI-c4ai-command-r-plus-tool_use", "Kimi-K2-Instruct", "Kimi-K2-Thinking",
    "LFM2-8B-A1B", "LFM2.5-Instruct", "fireworks-ai-llama-3-firefunction-v2",
    "ibm-granite-granite-3.3-2B-Instruct",
}  # fmt: skip


@pytest.mark.skipif(not _SOURCES, reason="TOKENWIRE_CHAT_TEMPLATES names no folder with templates")
@pytest.mark.parametrize("name", _SOURCES)
async def test_calls_of_a_published_template_are_read_back(name: str, tmp_path: Path) -> None:
    """A turn with one call, and with two if the template writes several.

    Templates without tools and calls get them in Hermes' form, which is read too.
    """
    source = _SOURCES[name]
    tokens = sorted({*_TOKEN.findall(source)} - {"<|im_start|>", "<|im_end|>"})
    generator = random.Random(1)
    shown = 0
    async with started(tmp_path, source, tokens) as model:
        for calls in (TYPED_CALLS[:1], TYPED_CALLS):
            try:
                text, state = await model.answer(message(calls))
            except ServiceError:
                continue
            [facts] = model.templates._facts.values()
            is_plain = facts.shows_tools and not facts.shows_calls  # earlier calls are JSON text
            if is_plain or not all(tool in text for tool, _ in calls):
                continue
            content, _, found = model.read(text, state, generator)
            single = model.templates.answers.calls.syntaxes[0].is_single
            assert found == (calls[:1] if single and len(found) < len(calls) else calls)
            assert not any(tool in content for tool, _ in calls[: len(found)])
            shown += 1
    assert bool(shown) == (name not in _SHOW_NO_CALLS)


@pytest.mark.skipif(not _SOURCES, reason="TOKENWIRE_CHAT_TEMPLATES names no folder with templates")
def test_no_published_template_contains_a_word_of_the_probes() -> None:
    """The words tell what is the template's own."""
    words = {CONTENT, *(name for name, _ in CALLS)}
    for name, source in _SOURCES.items():
        assert not [word for word in words if word in source], name
