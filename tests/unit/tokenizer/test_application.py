"""Start of the tokenizer service."""

import importlib.util

import pytest

from services.common.settings import StartupError
from services.tokenizer import application


def test_flag_for_gateways_names_the_package_that_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The package belongs to an extra of its own, which a server without gateways does not need."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(StartupError, match=r"pip install .*smg-grpc-proto"):
        application._facade_type()
