"""`tokenwire serve`: planned services, and refusals in one sentence."""

import dataclasses
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.accounts.key_file import add_key
from services.common.model_files.catalog_file import NO_TOKEN
from tokenwire.serving.serve_options import ServeError, ServeOptions
from tokenwire.serving.stack_layout import edge_of_catalog, plan, plan_catalog


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


PATIENT_SERVER = """
from tokenwire.cli import main
from tokenwire.serving import supervisor

supervisor._HELD_SECONDS = 1e6
main()
"""
"""`tokenwire` that holds the services' output back until they serve, on a busy machine too"""


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PATIENT_SERVER, "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def assert_refused(result: subprocess.CompletedProcess[str], *messages: str) -> None:
    """Require one sentence on stderr, nothing on stdout, exit code 2."""
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1, result.stderr
    for message in messages:
        assert message in result.stderr


def test_wrong_model_directory_is_refused_in_one_sentence(tmp_path: Path) -> None:
    assert_refused(serve("--model", str(tmp_path / "none")), "none' does not exist")
    assert_refused(serve("--model", str(tmp_path)), "no config.json")


def test_busy_port_is_refused_in_one_sentence(checkpoint: Path, taken_port: int) -> None:
    result = serve("--model", str(checkpoint), "--engine-port", str(taken_port))
    assert_refused(result, f"engine port 127.0.0.1:{taken_port}: address already in use.")


def test_port_held_by_an_outgoing_connection_is_explained(
    checkpoint: Path, taken_port: int, unused_ports: list[int]
) -> None:
    """No process listens on such a port, so a user would search in vain."""
    held = unused_ports[0]
    with socket.create_connection(("127.0.0.1", taken_port), source_address=("127.0.0.1", held)):
        result = serve("--model", str(checkpoint), "--engine-port", str(held))
    assert_refused(result, "engine port", str(held), "ip_local_reserved_ports")


def test_invalid_port_is_refused_in_one_sentence(checkpoint: Path) -> None:
    model = ("--model", str(checkpoint))
    assert_refused(serve(*model, "--port", "70000"), "between 1 and 65535")
    assert_refused(serve(*model, "--port", "50051"), "both 50051")


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--grace", "nan", "--grace must be between 0 and"),
        ("--grace", "-1", "--grace must be between 0 and"),
        ("--grace", "inf", "--grace must be between 0 and"),
        ("--tokenizer-port", "0", "--tokenizer-port must be between 1 and 65535"),
        ("--port", "-1", "--port must be between 1 and 65535"),
    ],
)
def test_number_out_of_range_is_refused_before_a_service_starts(
    checkpoint: Path, flag: str, value: str, message: str
) -> None:
    """Otherwise a service would end in a traceback, long after the others have started."""
    path = checkpoint / "catalog.toml"
    path.write_text('[[models]]\nid = "m"\npath = "."')
    assert_refused(serve("--model", str(checkpoint), flag, value), message)
    assert_refused(serve("--catalog", str(path), flag, value), message)


def test_metrics_port_beyond_the_last_port_is_refused_in_one_sentence(
    checkpoint: Path, unused_ports: list[int]
) -> None:
    result = serve(
        *("--model", str(checkpoint), "--tokenizer-port", "65000"),
        *("--port", str(unused_ports[0]), "--engine-port", str(unused_ports[1])),
        *("--grammar-port", str(unused_ports[2]), "--jobs-port", str(unused_ports[3])),
    )
    assert_refused(result, "tokenizer metrics port", "not 66000")


def test_unknown_host_is_refused_in_one_sentence(checkpoint: Path) -> None:
    assert_refused(
        serve("--model", str(checkpoint), "--host", "no.such.invalid", "--open"), "not known"
    )


@pytest.mark.parametrize(("host", "near"), [("0.0.0.0", "127.0.0.1:"), ("::1", "[::1]:")])
def test_each_service_gets_the_target_of_the_next_one(
    checkpoint: Path, host: str, near: str
) -> None:
    options = ServeOptions(
        host=host, port=1, model=checkpoint, engine_args="--kv-memory '1 GiB'", open=True
    )
    shim, jobs, tokenizer, engine, grammar = plan(options)
    assert [service.name for service in (shim, jobs, tokenizer, engine, grammar)] == [
        "http_shim",
        "jobs",
        "tokenizer",
        "engine",
        "grammar",
    ]
    for service, flag, target in (
        (shim, "--tokenizer", tokenizer.target),
        (shim, "--jobs", jobs.target),
        (jobs, "--tokenizer", tokenizer.target),
        (tokenizer, "--engine", engine.target),
        (engine, "--grammar", grammar.target),
    ):
        assert service.arguments[service.arguments.index(flag) + 1] == target
        assert target.startswith("127.0.0.1:" if service is engine else near)
    assert engine.arguments[-2:] == ("--kv-memory", "1 GiB")
    assert "0.0.0.0" not in grammar.arguments  # only the engine calls it


def test_stack_without_jobs_has_no_flag_of_them(checkpoint: Path) -> None:
    shim, *others = plan(ServeOptions(model=checkpoint, no_jobs=True))
    assert "--jobs" not in shim.arguments
    assert [service.name for service in others] == ["tokenizer", "engine", "grammar"]


def test_only_the_shim_gets_the_cors_origins(checkpoint: Path) -> None:
    shim, *others = plan(ServeOptions(model=checkpoint, cors_origins="https://a.example"))
    assert shim.arguments[-2:] == ("--cors-origins", "https://a.example")
    without = plan(ServeOptions(model=checkpoint))
    assert all("--cors-origins" not in each.arguments for each in (*others, *without))


def test_tokenizer_and_engine_get_the_same_model_id(checkpoint: Path) -> None:
    """Without --model-id both use the directory's name."""
    _, _, *named, _ = plan(ServeOptions(model=checkpoint, model_id="acme/small"))
    for service in named:
        at = service.arguments.index("--model-id")
        assert service.arguments[at + 1] == "acme/small"
    assert all("--model-id" not in each.arguments for each in plan(ServeOptions(model=checkpoint)))


def test_shim_gets_open_and_allowed_hosts_only_when_given(checkpoint: Path) -> None:
    options = ServeOptions(model=checkpoint)
    assert "--open" not in plan(options)[0].arguments
    assert "--open" in plan(dataclasses.replace(options, open=True))[0].arguments
    assert "--allowed-hosts" not in plan(options)[0].arguments
    named = dataclasses.replace(options, allowed_hosts="models.example")
    assert plan(named)[0].arguments[-2:] == ("--allowed-hosts", "models.example")


def test_no_service_starts_beyond_loopback_without_keys_or_open(checkpoint: Path) -> None:
    """Otherwise gRPC would be open to everybody until the shim refuses to start."""
    options = ServeOptions(host="0.0.0.0", model=checkpoint)
    with pytest.raises(ServeError, match="--open"):
        plan(options)
    with pytest.raises(ServeError, match="--open"):
        edge_of_catalog(options, checkpoint)


def test_unreadable_engine_arguments_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ServeError, match="engine's arguments"):
        plan(ServeOptions(model=checkpoint, engine_args="--kv-memory '1"))


@pytest.mark.parametrize("arguments", ["--port 1", "--port=1", "--threads 1 --grammar h:1"])
def test_engine_arguments_that_serve_sets_itself_are_refused(
    checkpoint: Path, arguments: str
) -> None:
    """Otherwise the other services would wait forever for an engine at another address."""
    assert_refused(
        serve("--model", str(checkpoint), f"--engine-args={arguments}"), "sets it itself"
    )
    options = catalog_of(checkpoint, ROW.format(name="a", arguments=arguments))
    with pytest.raises(ServeError, match="sets it itself"):
        plan_catalog(options)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--engine-args", "--kv-memroy 1GiB"),
            "engine: unknown flag --kv-memroy. Did you mean --kv-memory?",
        ),
        (("--dtype", "float8"), "engine: --dtype must be one of auto, float32,"),
    ],
)
def test_unknown_engine_flag_exits_with_2(
    tmp_path: Path, unused_ports: list[int], flags: tuple[str, str], message: str
) -> None:
    """Exit code 2 tells a service manager that a restart would not help."""
    http, tokenizer, engine, grammar, jobs = map(str, unused_ports)
    result = serve(
        *flags, "--log-dir", str(tmp_path), "--port", http,
        "--tokenizer-port", tokenizer, "--engine-port", engine, "--grammar-port", grammar,
        "--jobs-port", jobs,
    )  # fmt: skip
    assert_refused(result, message)


def test_startup_error_of_a_service_is_the_error_of_serve(
    checkpoint: Path, unused_ports: list[int]
) -> None:
    """The user sees the service's sentence without opening its log."""
    http, tokenizer, engine, grammar, jobs = map(str, unused_ports)
    result = serve(
        "--model", str(checkpoint), "--log-dir", str(checkpoint / "logs"),
        "--port", http, "--tokenizer-port", tokenizer,
        "--engine-port", engine, "--grammar-port", grammar, "--jobs-port", jobs,
    )  # fmt: skip
    assert_refused(result, "tokenwire: ")


def test_full_disk_is_reported_once_per_log(checkpoint: Path, unused_ports: list[int]) -> None:
    """A full disk must not turn every log line into a traceback."""
    logs = checkpoint / "logs"
    logs.mkdir()
    for name in ("http_shim", "jobs", "tokenizer", "engine", "grammar"):
        (logs / f"{name}.log").symlink_to("/dev/full")
    http, tokenizer, engine, grammar, jobs = map(str, unused_ports)
    result = serve(
        "--model", str(checkpoint), "--log-dir", str(logs),
        "--port", http, "--tokenizer-port", tokenizer,
        "--engine-port", engine, "--grammar-port", grammar, "--jobs-port", jobs,
    )  # fmt: skip
    assert result.returncode == 2, result.stderr
    *lost, why = result.stderr.splitlines()
    assert len(set(lost)) == len(lost) > 0
    for line in lost:
        assert re.fullmatch(r"tokenwire: the log of \w+ can't be written: No space .*", line)
    assert why.startswith("tokenwire: ")


def test_with_keys_grpc_listens_beyond_loopback_only_by_consent(checkpoint: Path) -> None:
    """Keys would cross the network in clear text."""
    options = ServeOptions(host="0.0.0.0", model=checkpoint, keys=Path("keys.json"))
    shim, *others = plan(options)
    assert "0.0.0.0" in shim.arguments
    assert shim.arguments[shim.arguments.index("--keys") + 1] == str(Path("keys.json").absolute())
    assert all("0.0.0.0" not in service.arguments for service in others)
    for consenting in (
        dataclasses.replace(options, open=True),
        dataclasses.replace(options, plaintext=True),
    ):
        opened = plan(consenting)
        assert sum("0.0.0.0" in service.arguments for service in opened) == 4


def test_services_get_keys_and_the_token_by_which_they_know_each_other(checkpoint: Path) -> None:
    keys, token = Path("keys.json"), Path("token")
    options = ServeOptions(model=checkpoint, keys=keys, peer_token_file=token)
    for service in plan(options):
        arguments = service.arguments
        assert arguments[arguments.index("--peer-token-file") + 1] == str(token.absolute())
        assert ("--keys" in arguments) == (service.name != "grammar")


def test_token_of_the_stack_goes_to_no_other_installation(checkpoint: Path) -> None:
    text = f'[[models]]\nid = "a"\npath = "{checkpoint}"\n[[models]]\nid = "b"\ntarget = "far:1"'
    options = dataclasses.replace(catalog_of(checkpoint, text), peer_token_file=Path("token"))
    near, far = plan_catalog(options).models
    assert (near.peer_token_file, far.peer_token_file) == (Path("token"), NO_TOKEN)


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


def test_each_checkpoint_of_a_catalog_has_its_own_services(checkpoint: Path) -> None:
    options = catalog_of(
        checkpoint,
        ROW.format(name="a", arguments="--threads 1")
        + ROW.format(name="b", arguments="--threads 1")
        + ROW.format(name="c", arguments="")
        + '[models.variants.f]\ndtype = "float32"\nchat_template = "f.jinja"\n'
        + '[[models]]\nid = "far"\ntarget = "h:1"\n'
        + '[[models]]\nid = "soon"\nplaceholder = true\n',
    )
    plan = plan_catalog(options)
    a, b, c, variant, far, soon = plan.models
    assert a.target == b.target, "same checkpoint and flags"
    assert len({a.target, c.target, variant.target}) == 3
    assert (far.target, soon.target) == ("h:1", None)
    assert all(model.path is None for model in plan.models)
    services = [service for each in plan.services.values() for service in each]
    assert len({service.target for service in services}) == len(services) == 9
    with_template = [s.arguments for s in services if "--chat-template" in s.arguments]
    assert [each[-1] for each in with_template] == [str(checkpoint / "f.jinja")]
    engines = [service.arguments for service in services if service.name == "engine"]
    assert engines[0][-2:] == ("--threads", "1")
    assert engines[2][engines[2].index("--dtype") + 1] == "float32"


def test_engine_of_a_catalog_loads_its_adapters(checkpoint: Path) -> None:
    adapter = '[[models]]\nid = "{name}"\nadapter_of = "m"\npath = "{name}"\n'
    options = catalog_of(
        checkpoint,
        adapter.format(name="sql")
        + ROW.format(name="m", arguments="")
        + "[models.variants.short]\nmax_output_length = 4\n"
        + adapter.format(name="java"),
    )
    plan = plan_catalog(options)
    assert len({model.target for model in plan.models}) == 1
    assert [model.adapter_of for model in plan.models] == ["m", "", "", "m"]
    [services] = plan.services.values()
    [engine] = [service.arguments for service in services if service.name == "engine"]
    wanted = f"sql={checkpoint / 'sql'},java={checkpoint / 'java'}"
    assert engine[engine.index("--adapters") + 1] == wanted


def test_adapters_stand_in_the_catalog_or_the_engines_arguments(checkpoint: Path) -> None:
    text = ROW.format(name="m", arguments="--adapters x=y")
    text += '[[models]]\nid = "sql"\nadapter_of = "m"\npath = "sql"\n'
    with pytest.raises(ServeError, match="m has adapters in the catalog"):
        plan_catalog(catalog_of(checkpoint, text))


def test_reloaded_catalog_keeps_the_ports_of_unchanged_models(checkpoint: Path) -> None:
    old, new = ROW.format(name="old", arguments=""), ROW.format(name="new", arguments="--threads 1")
    current = plan_catalog(catalog_of(checkpoint, old))
    both = plan_catalog(catalog_of(checkpoint, new + old), current)
    (old_services,) = current.services.values()
    assert old_services in both.services.values()
    assert len(both.services) == 2


def test_wrong_catalog_is_refused_in_one_sentence(checkpoint: Path) -> None:
    path = checkpoint / "catalog.toml"
    assert_refused(serve("--catalog", str(path)), "can't be read")
    path.write_text('[[models]]\nid = "m"\npath = "nowhere"')
    assert_refused(serve("--catalog", str(path)), "nowhere does not exist")
    path.write_text('[[models]]\nid = "m"\npath = "."\nengine_args = "\'"')
    assert_refused(serve("--catalog", str(path)), "engine's arguments")
    assert_refused(serve("--catalog", str(path), "--model", str(checkpoint)), "leave out MODEL")
    assert_refused(serve("--catalog", str(path), "--model-id", "m"), "leave out MODEL")


def test_every_service_sends_its_traces_to_the_collector(checkpoint: Path) -> None:
    collector = "http://127.0.0.1:4317"
    services = plan(ServeOptions(model=checkpoint, otlp_endpoint=collector))
    assert len(services) == 5
    for service in services:
        flag = service.arguments.index("--otlp-endpoint")
        assert service.arguments[flag + 1] == collector


@pytest.mark.parametrize("log_format", ["auto", "text", "json"])
def test_services_log_json_whatever_people_read(checkpoint: Path, log_format: str) -> None:
    """The supervisor explains an exit by the last record, and log files are read by programs."""
    for service in plan(ServeOptions(model=checkpoint, log_format=log_format)):
        assert service.arguments[service.arguments.index("--log-format") + 1] == "json"


def test_several_shims_share_the_port_and_have_metrics_of_their_own(checkpoint: Path) -> None:
    services = plan(ServeOptions(model=checkpoint, shims=3, tokenizers=2))
    shims = [each for each in services if each.name == "http_shim"]
    tokenizers = [each.target for each in services if each.name == "tokenizer"]
    assert {shim.target for shim in shims} == {"127.0.0.1:8000"}
    assert [shim.flag("--metrics-port") for shim in shims] == ["9000", "9010", "9020"]
    assert tokenizers == ["127.0.0.1:50051", "127.0.0.1:50061"]
    assert {shim.flag("--tokenizer") for shim in shims} == {",".join(tokenizers)}
    stated = plan(ServeOptions(model=checkpoint, shims=2, service_flags=("--metrics-port", "9100")))
    assert [each.flag("--metrics-port") for each in stated[:2]] == ["9100", "9110"]


def test_shims_that_would_each_count_limits_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    add_key(keys)
    for flag in ("--shims", "--tokenizers"):
        result = serve("--model", str(checkpoint), "--keys", str(keys), flag, "2")
        assert_refused(result, f"{flag} 2 with --keys needs --limits-url")
    assert_refused(serve("--model", str(checkpoint), "--shims", "17"), "between 0 and 16, not 17")
