"""Invalid settings are refused at start-up with one sentence."""

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from services.common.settings import StartupError, parse
from services.common.telemetry import serve_metrics
from services.engine.settings import EngineSettings
from services.grammar.settings import GrammarSettings
from services.http_shim.settings import HttpShimSettings
from services.tokenizer.settings import TokenizerSettings

SERVICES: tuple[type[Any], ...] = (
    HttpShimSettings,
    TokenizerSettings,
    EngineSettings,
    GrammarSettings,
)


def refusal(settings: type[Any]) -> str:
    """Return the sentence with which parsing fails."""
    with pytest.raises(StartupError) as refused:
        parse(settings, "python -m services.it", "TOKENWIRE_IT")
    said = str(refused.value)
    assert len(said.splitlines()) == 1, said
    return said


def bad_numbers() -> Iterator[Any]:
    for settings in SERVICES:
        for field in dataclasses.fields(settings):
            flag = "--" + field.name.replace("_", "-")
            if type(field.default) is int:
                values = ["-2", str(2**60)]
            elif type(field.default) is float:
                values = ["nan", "inf", "-inf", "-1", "1e300"]
            else:
                continue
            for value in values:
                yield pytest.param(settings, flag, value, id=f"{settings.__name__}{flag}={value}")


@pytest.mark.parametrize(("settings", "flag", "value"), list(bad_numbers()))
def test_every_number_has_a_range(
    settings: type[Any], flag: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unchecked number fails at the first request, or never: `nan <= 0` is false."""
    monkeypatch.setattr(sys, "argv", ["it", f"{flag}={value}"])
    assert refusal(settings).startswith(f"{flag} must be between ")


@pytest.mark.parametrize("settings", SERVICES)
def test_defaults_are_valid(settings: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["it"])
    assert parse(settings, "it", "TOKENWIRE_IT") == settings()


@pytest.mark.parametrize("in_environment", [False, True])
def test_an_invalid_choice_is_answered_with_the_valid_ones(
    in_environment: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the flag, also for an environment variable."""
    monkeypatch.setattr(sys, "argv", ["it"] if in_environment else ["it", "--log-level", "loud"])
    if in_environment:
        monkeypatch.setenv("TOKENWIRE_IT_LOG_LEVEL", "loud")
    said = refusal(GrammarSettings)
    assert said == "--log-level must be one of debug, info, warning, error, not 'loud'."


def test_an_unknown_flag_is_reported_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["it", "--kv-memroy", "1GiB"])
    assert "--kv-memroy" in refusal(EngineSettings)


@pytest.mark.parametrize("settings", SERVICES)
def test_help_lists_every_flag(settings: type[Any], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(settings, "it", "TOKENWIRE_IT", ["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    flags = {"--" + field.name.replace("_", "-") for field in dataclasses.fields(settings)}
    assert {flag for flag in flags if flag not in printed} == set()


def test_metrics_beyond_the_last_port_are_refused_with_the_remedy() -> None:
    """The default port of metrics is the gRPC port + 1000, which is invalid for 65000."""
    with pytest.raises(StartupError, match=r"66000.*--metrics-port"):
        serve_metrics("127.0.0.1", 66000)
