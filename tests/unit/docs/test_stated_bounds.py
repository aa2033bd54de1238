"""Tables of docs/ state the bounds that the protos have."""

import re
from pathlib import Path

import pytest

from services.common.bounds import bounds_of, most
from services.common.contract import MAX_STOP_TOKEN_IDS
from tokenwire.pb.completion.v1.completion_pb2 import Conversation, GenerateRequest, Prompts

ROOT = Path(__file__).resolve().parents[3]
HTTP = (ROOT / "docs/api.md").read_text(encoding="utf-8")


def span(path: str, *, items: bool = False) -> str:
    """Return the range of a number as the tables write it: "−2–2"."""
    bounds = bounds_of(GenerateRequest, path)
    bounds = bounds.items if items else bounds
    return f"{bounds.least:g}–{bounds.most:g}".replace("-", "−")


def most_characters(path: str) -> str:
    return f"{bounds_of(GenerateRequest, path).items.max_length:,} characters"


@pytest.mark.parametrize(
    ("field", "stated"),
    [
        ("temperature", span("sampling.temperature")),
        ("top_p", span("sampling.top_p")),
        ("top_k", f"–{most(GenerateRequest, 'sampling.top_k')} "),
        ("frequency_penalty", span("sampling.frequency_penalty")),
        ("presence_penalty", span("sampling.presence_penalty")),
        ("repetition_penalty", f"(0, {most(GenerateRequest, 'sampling.repetition_penalty')}]"),
        ("logit_bias", span("sampling.logit_bias", items=True)),
        ("n", span("n")),
        ("best_of", f"prompts × best_of ≤ {most(GenerateRequest, 'best_of')}"),
        ("length_penalty", span("beam_search.length_penalty")),
        ("top_logprobs", f"0–{most(GenerateRequest, 'logprobs')}"),
        ("stop", most_characters("stop")),
        ("stop_token_ids", f"up to {MAX_STOP_TOKEN_IDS} ids"),
        ("bad_words", f"up to {most(GenerateRequest, 'bad_words')} "),
        ("bad_words", most_characters("bad_words")),
        (
            "dry_sequence_breakers",
            f"at most {most(GenerateRequest, 'dry_sequence_breakers')} breakers of "
            + most_characters("dry_sequence_breakers"),
        ),
        ("images", f"up to {most(Prompts, 'images')} "),
        ("messages", f"up to {most(Conversation, 'messages'):,},"),
        ("tools", f"up to {most(GenerateRequest, 'tools')}, "),
        (
            "chat_template_kwargs",
            f"up to {most(Conversation, 'template_arguments_json'):,} characters",
        ),
        (
            "reasoning_effort",
            ", ".join(f"`{e}`" for e in bounds_of(Conversation, "reasoning_effort").one_of),
        ),
    ],
)
def test_page_of_http_states_the_bound(field: str, stated: str) -> None:
    rows = re.findall(rf"^\| [^|]*`{field}`[^|]* \|.*$", HTTP, re.MULTILINE)
    assert any(stated in row for row in rows), (stated, rows)


def test_contract_shows_bounds_as_the_protos_have_them() -> None:
    text = "".join(path.read_text() for path in (ROOT / "protos/tokenwire").rglob("*.proto"))
    contract = (ROOT / "docs/contract.md").read_text(encoding="utf-8")
    shown = re.findall(r"^(?:optional|repeated) .* = \d+ \[.*\];$", contract, re.MULTILINE)
    assert len(shown) == 2
    assert all(line in text for line in shown)
