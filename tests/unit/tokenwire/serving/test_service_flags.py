"""Flags of the services on the command line of `tokenwire serve`."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from tests.unit.tokenwire.serving.test_stack_layout import serve
from tokenwire.serving.serve_options import ServeOptions
from tokenwire.serving.service_flags import SETTINGS, FlagError, split_flags
from tokenwire.serving.stack_layout import plan

OF_SERVE = {
    *(
        "host",
        "port",
        "grace",
        "log_format",
        "model",
        "model_id",
        "catalog",
        "dtype",
        "keys",
        "limits_url",
    ),
    *("peer_token_file", "tls_cert", "tls_key", "plaintext", "open", "chat_template"),
    *("cors_origins", "allowed_hosts", "otlp_endpoint"),
}
"""Settings that `tokenwire serve` has flags of its own for"""
WIRING = {"fd", "engine", "tokenizer", "grammar", "jobs", "peer_ca", "peer_cert", "peer_key"}
"""Settings by which the services of a stack find each other"""


def test_every_other_setting_of_a_service_is_a_flag_of_serve() -> None:
    """Messages name flags of services; who follows one must not meet "unknown flag"."""
    for service, settings in SETTINGS.items():
        for field in dataclasses.fields(settings):
            if field.name in OF_SERVE | WIRING:
                continue
            flag = "--" + field.name.replace("_", "-")
            is_switch = isinstance(field.default, bool)
            flags = split_flags([flag] if is_switch else [flag, "7"])
            if field.name in ("metrics_port", "tls_client_ca"):
                assert [name for name, given in flags.items() if given] == ["http_shim"]
            else:
                assert flags[service] == (flag if is_switch else f"{flag}=7",)


def test_flag_goes_to_the_services_that_have_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    flags = (
        *("--fetch-images", "--vllm-metrics", "--log-level", "debug", "--no-vllm-api"),
        *("--file-folder", "files"),
    )
    services = plan(ServeOptions(model=tmp_path, service_flags=flags))
    given = {service.name: set(service.arguments) for service in services}
    assert all("--log-level=debug" in arguments for arguments in given.values())
    assert [name for name, each in given.items() if "--fetch-images" in each] == [
        "http_shim",
        "jobs",
    ]
    assert [name for name, each in given.items() if "--file-folder=files" in each] == ["jobs"]
    assert [name for name, each in given.items() if "--no-vllm-api" in each] == ["tokenizer"]
    assert "--vllm-metrics" not in given["grammar"]


def test_engine_arguments_take_precedence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    options = ServeOptions(
        model=tmp_path, service_flags=("--threads", "2"), engine_args="--threads 3"
    )
    [engine] = [service for service in plan(options) if service.name == "engine"]
    assert engine.arguments.index("--threads=2") < engine.arguments.index("--threads")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--fetch-imges",), "unknown flag --fetch-imges. Did you mean --fetch-images"),
        (("--engine", "h:1"), "--engine is set by `tokenwire serve` itself"),
        (("--response-store",), "--response-store: expected one argument"),
    ],
)
def test_flag_of_no_service_is_refused_by_its_name(flags: tuple[str, ...], reason: str) -> None:
    with pytest.raises(FlagError, match=re.escape(reason)):
        split_flags(flags)
    refused = serve(*flags)
    assert refused.returncode == 2
    assert reason in refused.stderr.splitlines()[-1]
