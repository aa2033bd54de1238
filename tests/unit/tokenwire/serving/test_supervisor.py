"""`tokenwire serve`: what it starts, and how it refuses to."""

import dataclasses
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenwire.serving.stack_layout import (
    ServeError,
    ServeOptions,
    plan,
    plan_catalog,
    shim_of_catalog,
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    return tmp_path


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tokenwire", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def assert_refused(result: subprocess.CompletedProcess[str], *said: str) -> None:
    """One sentence on stderr, nothing on stdout, exit code 2."""
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1, result.stderr
    for words in said:
        assert words in result.stderr


def test_a_wrong_model_directory_is_one_sentence(tmp_path: Path) -> None:
    assert_refused(serve("--model", str(tmp_path / "none")), "none does not exist")
    assert_refused(serve("--model", str(tmp_path)), "no config.json")


def test_a_busy_port_is_one_sentence(checkpoint: Path, taken_port: int) -> None:
    result = serve("--model", str(checkpoint), "--engine-port", str(taken_port))
    assert_refused(result, f"engine port 127.0.0.1:{taken_port}: address already in use.")


def test_a_port_that_an_outgoing_connection_holds_is_explained(
    checkpoint: Path, taken_port: int, unused_ports: list[int]
) -> None:
    """Who looks for the process that listens finds none."""
    held = unused_ports[0]
    with socket.create_connection(("127.0.0.1", taken_port), source_address=("127.0.0.1", held)):
        result = serve("--model", str(checkpoint), "--engine-port", str(held))
    assert_refused(result, "engine port", str(held), "ip_local_reserved_ports")


def test_a_bad_port_is_one_sentence(checkpoint: Path) -> None:
    model = ("--model", str(checkpoint))
    assert_refused(serve(*model, "--port", "70000"), "between 1 and 65535")
    assert_refused(serve(*model, "--port", "50051"), "both 50051")


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--grace", "nan", "--grace must be between 0 and"),
        ("--grace", "-1", "--grace must be between 0 and"),
        ("--grace", "inf", "--grace must be between 0 and"),
        ("--tokenizer-port", "0", "tokenizer port must be between 1 and 65535"),
        ("--port", "-1", "HTTP port must be between 1 and 65535"),
    ],
)
def test_numbers_are_checked_before_anything_starts(
    checkpoint: Path, flag: str, value: str, said: str
) -> None:
    """With a catalog too; a service would end in a traceback, long after the others have come."""
    path = checkpoint / "catalog.toml"
    path.write_text('[[models]]\nid = "m"\npath = "."')
    assert_refused(serve("--model", str(checkpoint), flag, value), said)
    assert_refused(serve("--catalog", str(path), flag, value), said)


def test_metrics_beyond_the_last_port_are_one_sentence(checkpoint: Path) -> None:
    said = ("tokenizer metrics port", "not 66000")
    assert_refused(serve("--model", str(checkpoint), "--tokenizer-port", "65000"), *said)


def test_an_unknown_host_is_one_sentence(checkpoint: Path) -> None:
    assert_refused(
        serve("--model", str(checkpoint), "--host", "no.such.invalid", "--open"), "not known"
    )


def test_each_service_is_told_where_the_next_one_is(checkpoint: Path) -> None:
    options = ServeOptions(
        host="0.0.0.0", port=1, model=checkpoint, engine_args="--kv-memory '1 GiB'", open=True
    )
    shim, tokenizer, engine, grammar = plan(options)
    assert [service.name for service in (shim, tokenizer, engine, grammar)] == [
        "http_shim",
        "tokenizer",
        "engine",
        "grammar",
    ]
    for service, flag, target in (
        (shim, "--tokenizer", tokenizer.target),
        (tokenizer, "--engine", engine.target),
        (engine, "--grammar", grammar.target),
    ):
        assert service.arguments[service.arguments.index(flag) + 1] == target
        assert target.startswith("127.0.0.1:")
    assert engine.arguments[-2:] == ("--kv-memory", "1 GiB")
    assert "0.0.0.0" not in grammar.arguments  # it is nobody's way in


def test_the_shim_alone_is_told_of_origins(checkpoint: Path) -> None:
    shim, *others = plan(ServeOptions(model=checkpoint, cors_origins="https://a.example"))
    assert shim.arguments[-2:] == ("--cors-origins", "https://a.example")
    without = plan(ServeOptions(model=checkpoint))
    assert all("--cors-origins" not in each.arguments for each in (*others, *without))


def test_the_model_has_the_name_that_it_is_given(checkpoint: Path) -> None:
    """Tokenizer and engine must agree on it; without one it is the directory's."""
    _, *named, _ = plan(ServeOptions(model=checkpoint, model_id="acme/small"))
    for service in named:
        at = service.arguments.index("--model-id")
        assert service.arguments[at + 1] == "acme/small"
    assert all("--model-id" not in each.arguments for each in plan(ServeOptions(model=checkpoint)))


def test_the_server_is_opened_only_when_asked(checkpoint: Path) -> None:
    options = ServeOptions(model=checkpoint)
    assert "--open" not in plan(options)[0].arguments
    assert "--open" in plan(dataclasses.replace(options, open=True))[0].arguments
    assert "--allowed-hosts" not in plan(options)[0].arguments
    named = dataclasses.replace(options, allowed_hosts="models.example")
    assert plan(named)[0].arguments[-2:] == ("--allowed-hosts", "models.example")


def test_beyond_loopback_nothing_starts_without_keys_or_a_word(checkpoint: Path) -> None:
    """Not the shim alone: gRPC would be open to everybody until the shim has said no."""
    options = ServeOptions(host="0.0.0.0", model=checkpoint)
    with pytest.raises(ServeError, match="--open"):
        plan(options)
    with pytest.raises(ServeError, match="--open"):
        shim_of_catalog(options, checkpoint)


def test_unreadable_engine_arguments_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ServeError, match="engine's arguments"):
        plan(ServeOptions(model=checkpoint, engine_args="--kv-memory '1"))


@pytest.mark.parametrize("arguments", ["--port 1", "--port=1", "--threads 1 --grammar h:1"])
def test_engine_arguments_that_are_not_the_users_are_refused(
    checkpoint: Path, arguments: str
) -> None:
    """The others would wait for ever for an engine that is elsewhere."""
    assert_refused(
        serve("--model", str(checkpoint), f"--engine-args={arguments}"), "sets it itself"
    )
    options = catalog_of(checkpoint, ROW.format(name="a", arguments=arguments))
    with pytest.raises(ServeError, match="sets it itself"):
        plan_catalog(options)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--engine-args", "--kv-memroy 1GiB"), "engine: unrecognized arguments: --kv-memroy 1GiB"),
        (("--dtype", "float8"), "engine: --dtype must be one of auto, float32,"),
    ],
)
def test_a_typo_for_the_engine_could_not_start(
    tmp_path: Path, unused_ports: list[int], flags: tuple[str, str], said: str
) -> None:
    """Exit code 2 tells whoever restarts services that it is of no use."""
    http, tokenizer, engine, grammar = map(str, unused_ports)
    result = serve(
        *flags, "--log-dir", str(tmp_path), "--port", http,
        "--tokenizer-port", tokenizer, "--engine-port", engine, "--grammar-port", grammar,
    )  # fmt: skip
    assert_refused(result, said)


def test_a_service_that_can_not_start_says_why(checkpoint: Path, unused_ports: list[int]) -> None:
    """The sentence of the service is the sentence of the command."""
    http, tokenizer, engine, grammar = map(str, unused_ports)
    result = serve(
        "--model", str(checkpoint), "--log-dir", str(checkpoint / "logs"),
        "--port", http, "--tokenizer-port", tokenizer,
        "--engine-port", engine, "--grammar-port", grammar,
    )  # fmt: skip
    assert_refused(result, "tokenwire: ")


def test_a_log_that_can_not_be_written_does_not_matter(
    checkpoint: Path, unused_ports: list[int]
) -> None:
    """A full disk must not turn every line of a service into a traceback."""
    logs = checkpoint / "logs"
    logs.mkdir()
    for name in ("http_shim", "tokenizer", "engine", "grammar"):
        (logs / f"{name}.log").symlink_to("/dev/full")
    http, tokenizer, engine, grammar = map(str, unused_ports)
    result = serve(
        "--model", str(checkpoint), "--log-dir", str(logs),
        "--port", http, "--tokenizer-port", tokenizer,
        "--engine-port", engine, "--grammar-port", grammar,
    )  # fmt: skip
    assert result.returncode == 2, result.stderr
    *lost, why = result.stderr.splitlines()
    assert len(set(lost)) == len(lost) > 0
    for line in lost:
        assert re.fullmatch(r"tokenwire: the log of \w+ can't be written: No space .*", line)
    assert why.startswith("tokenwire: ")


def test_with_keys_only_http_leaves_the_machine(checkpoint: Path) -> None:
    """gRPC asks nobody for a key."""
    options = ServeOptions(host="0.0.0.0", model=checkpoint, keys=Path("keys.json"))
    shim, *others = plan(options)
    assert "0.0.0.0" in shim.arguments
    assert shim.arguments[shim.arguments.index("--keys") + 1] == str(Path("keys.json").absolute())
    assert all("0.0.0.0" not in service.arguments for service in others)
    opened = plan(dataclasses.replace(options, open=True))
    assert sum("0.0.0.0" in service.arguments for service in opened) == 3


def catalog_of(checkpoint: Path, text: str) -> ServeOptions:
    path = checkpoint / "catalog.toml"
    path.write_text(text)
    return ServeOptions(catalog=path, tokenizer_port=23100)


ROW = """
[[models]]
id = "{name}"
path = "."
engine_args = "{arguments}"
"""


def test_each_checkpoint_of_a_catalog_has_services_of_its_own(checkpoint: Path) -> None:
    options = catalog_of(
        checkpoint,
        ROW.format(name="a", arguments="--threads 1")
        + ROW.format(name="b", arguments="--threads 1")
        + ROW.format(name="c", arguments="")
        + '[models.variants.f]\ndtype = "float32"\n'
        + '[[models]]\nid = "far"\ntarget = "h:1"\n'
        + '[[models]]\nid = "soon"\nplaceholder = true\n',
    )
    plan = plan_catalog(options)
    a, b, c, variant, far, soon = plan.models
    assert a.target == b.target, "the same checkpoint, served alike"
    assert len({a.target, c.target, variant.target}) == 3
    assert (far.target, soon.target) == ("h:1", None)
    assert all(model.path is None for model in plan.models)
    services = [service for each in plan.services.values() for service in each]
    assert len({service.target for service in services}) == len(services) == 9
    engines = [service.arguments for service in services if service.name == "engine"]
    assert engines[0][-2:] == ("--threads", "1")
    assert engines[2][engines[2].index("--dtype") + 1] == "float32"


def test_what_stays_in_a_catalog_stays_where_it_is(checkpoint: Path) -> None:
    old, new = ROW.format(name="old", arguments=""), ROW.format(name="new", arguments="--threads 1")
    current = plan_catalog(catalog_of(checkpoint, old))
    both = plan_catalog(catalog_of(checkpoint, new + old), current)
    (old_services,) = current.services.values()
    assert old_services in both.services.values()
    assert len(both.services) == 2


def test_a_bad_catalog_is_one_sentence(checkpoint: Path) -> None:
    path = checkpoint / "catalog.toml"
    assert_refused(serve("--catalog", str(path)), "can't be read")
    path.write_text('[[models]]\nid = "m"\npath = "nowhere"')
    assert_refused(serve("--catalog", str(path)), "nowhere does not exist")
    path.write_text('[[models]]\nid = "m"\npath = "."\nengine_args = "\'"')
    assert_refused(serve("--catalog", str(path)), "engine's arguments")
    assert_refused(serve("--catalog", str(path), "--model", str(checkpoint)), "leave out --model")
    assert_refused(serve("--catalog", str(path), "--model-id", "m"), "leave out --model")
