"""The command `bench`: speed of a server, as its users see it."""

import argparse
import asyncio
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenwire.cli.arguments import (
    Commands,
    add_command,
    add_json,
    add_key,
    add_tls,
    add_url,
    key_for,
    number,
    tls_of,
    whole_number,
)
from tokenwire.cli.output import print_error, print_json, print_text
from tokenwire.cli.progress_line import ProgressLine
from tokenwire.extras import install_command

if TYPE_CHECKING:
    from tokenwire.load.stream_bench import BenchPlan, Level, StreamBench

__all__ = ["add_commands"]

_MOST_STREAMS = 1024
_INTERRUPTED = 130
_PROGRESS_SECONDS = 0.25
_LEAST_BAR, _MOST_BAR = 8, 40


def add_commands(commands: Commands) -> None:
    """Add the command."""
    bench = add_command(
        commands,
        "bench",
        _bench,
        "Measure the speed of a server with an OpenAI-compatible API: tokens/s, time to the first "
        "token and between tokens, at 1, 8 and 32 streams.",
        "bench",
        "bench --save before.json",
        "bench --compare before.json",
        "bench --url http://127.0.0.1:11434 llama3.2 --streams 1,4",
    )
    bench.add_argument("model", nargs="?", metavar="MODEL", help="Model id; by default the first.")
    bench.add_argument("--model", dest="flagged", metavar="MODEL", help="The same as a flag.")
    add_url(bench)
    bench.add_argument(
        "--streams",
        type=_streams,
        default=(1, 8, 32),
        metavar="N,N,…",
        help="Requests at a time (default: 1,8,32).",
    )
    bench.add_argument(
        "--prompt-tokens",
        type=whole_number(1, 1_000_000),
        default=128,
        metavar="N",
        help="Length of the random prompts, about (default: %(default)s).",
    )
    bench.add_argument("--prompt", help="Prompt of all requests in place of random ones.")
    bench.add_argument(
        "--output-tokens",
        type=whole_number(1, 1_000_000),
        default=128,
        metavar="N",
        help="Length of the answers (default: %(default)s).",
    )
    bench.add_argument(
        "--requests",
        type=whole_number(1, 100_000),
        metavar="N",
        help="Requests at each number of streams (default: 2 a stream, at least 3).",
    )
    bench.add_argument(
        "--seconds",
        type=number(1, 86_400),
        default=60.0,
        help="Time after which no further request is sent at a number of streams "
        "(default: %(default)g).",
    )
    bench.add_argument(
        "--endpoint",
        choices=["chat", "completions"],
        default="chat",
        help="chat = /v1/chat/completions, completions = /v1/completions (default: %(default)s).",
    )
    bench.add_argument("--save", type=Path, metavar="FILE", help="Write the figures as JSON.")
    bench.add_argument(
        "--compare", type=Path, metavar="FILE", help="Show the change since a file of --save."
    )
    add_tls(bench)
    add_key(bench)
    add_json(bench)


async def _bench(options: argparse.Namespace) -> int:
    if options.model and options.flagged:
        print_error("The model is named twice: as MODEL and by --model.")
        return 2
    try:
        from tokenwire.load.http_client import HttpClient
    except ModuleNotFoundError as error:
        print_error(f"`tokenwire bench` needs {error.name}: {install_command('cli')}")
        return 2
    from tokenwire.load.load_run import Endpoint, Target
    from tokenwire.load.stream_bench import BenchError, BenchPlan, StreamBench, only_model

    plan = BenchPlan(
        options.streams,
        options.prompt_tokens,
        options.output_tokens,
        options.requests,
        options.seconds,
        warm_seconds=600.0,
        text=options.prompt or "",
    )
    url = options.url.removesuffix("/v1")
    tls = tls_of(options)
    client = HttpClient(
        url, key=key_for(options.url, options), tls=None if tls is None else tls.context()
    )
    try:
        earlier = _read_saved(options.compare)
        model = options.model or options.flagged or await only_model(client, url)
        endpoint = Endpoint.CHAT if options.endpoint == "chat" else Endpoint.COMPLETIONS
        bench = StreamBench(client, Target(url, model, endpoint=endpoint), plan)
        return await _measure(bench, plan, earlier, options)
    except BenchError as error:
        print_error(str(error))
        return 1
    finally:
        client.close()


async def _measure(
    bench: "StreamBench", plan: "BenchPlan", earlier: Any, options: argparse.Namespace
) -> int:
    """Run the benchmark, and show it level by level. Return the exit code."""
    with ProgressLine() as progress:
        progress.show("first request …")
        warm = await bench.warm_up()
        if not options.json:
            progress.clear()
            _print_head(bench, plan, warm)
        levels: list[Level] = []
        showing = asyncio.create_task(_follow(progress, bench, plan, levels))
        try:
            async for level in bench.levels():
                levels.append(level)
                progress.clear()
                if not options.json:
                    _print_level(level)
        finally:
            showing.cancel()
    result = _result(bench, plan, levels)
    if options.json:
        print_json(result)
    elif levels:
        _print_plot(levels, earlier)
    if options.save is not None and levels:
        options.save.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    task = asyncio.current_task()
    if task is not None and task.cancelling():  # Ctrl-C: what there is has been shown
        task.uncancel()
        print_error("interrupted; the figures are those of the requests that had ended")
        return _INTERRUPTED
    return 1 if any(level.errors for level in levels) else 0


async def _follow(
    line: ProgressLine, bench: "StreamBench", plan: "BenchPlan", levels: "Sequence[Level]"
) -> None:
    """Show how many requests of the current level have ended."""
    while True:
        if len(levels) < len(plan.streams):
            streams = plan.streams[len(levels)]
            planned = plan.workload(streams).requests
            line.show(f"{streams} streams: {bench.ended} of {planned} requests")
        await asyncio.sleep(_PROGRESS_SECONDS)


def _print_head(bench: "StreamBench", plan: "BenchPlan", warm: float) -> None:
    prompts = "one prompt" if plan.text else f"prompts of about {plan.prompt} tokens"
    exact = "" if "ignore_eos" in bench.target.fields else "at most "
    print_text(f"{bench.target.model} at {bench.target.url}{bench.target.endpoint}")
    print(f"{prompts}, answers of {exact}{plan.output} tokens; first request {warm:.2f} s\n")
    print("                      first token ms       between tokens ms")
    print("streams  tokens/s       p50       p99       p50       p99   requests", flush=True)


def _print_level(level: "Level") -> None:
    first, between = level.first_token, level.inter_token
    cells = [first and first.p50, first and first.p99, between and between.p50]
    cells.append(between and between.p99)
    shown = "".join(f"{'–' if each is None else f'{each:.1f}':>10}" for each in cells)
    failed = sum(level.errors.values())
    count = f"{level.requests - failed}" + (f", {failed} failed" if failed else "")
    print(f"{level.streams:7}{level.tokens_per_second:10.1f}{shown}   {count}", flush=True)
    for reason, number_of in level.errors.items():
        print_text(f"         {number_of} × {reason}")


def _print_plot(levels: "Sequence[Level]", earlier: Any) -> None:
    """Print bars of tokens/s, and what the figures are based on."""
    before = {row["streams"]: row for row in (earlier or {}).get("levels", ())}
    columns = shutil.get_terminal_size().columns
    width = min(max(columns - 40, _LEAST_BAR), _MOST_BAR)
    most = max(level.tokens_per_second for level in levels) or 1.0
    print("\ntokens/s")
    for level in levels:
        bar = _bar(level.tokens_per_second / most, width)
        change = _change(level, before.get(level.streams))
        print(f"{level.streams:7} {bar:{width}} {level.tokens_per_second:9.1f}{change}")
    means = f"{levels[-1].prompt_tokens:g} tokens in, {levels[-1].output_tokens:g} out"
    if all(level.is_usage for level in levels):
        print(f"\nTokens are counted by the server's usage: {means} a request.")
    else:
        print("\nTokens are counted by events: the server states no usage.")
    merged = max(level.tokens_per_event for level in levels)
    if merged > 1.05:
        print(f"An event carries up to {merged:.1f} tokens; times are those between events.")


def _change(level: "Level", before: Any) -> str:
    """Return the change since an earlier measurement."""
    if before is None or not before["tokens_per_second"]:
        return ""
    parts = [_percent(level.tokens_per_second, before["tokens_per_second"])]
    if level.first_token is not None and before["first_token"]:
        parts.append(f"first token {_percent(level.first_token.p50, before['first_token']['p50'])}")
    return f"  {', '.join(parts)}"


def _percent(now: float, before: float) -> str:
    return f"{100 * (now / before - 1):+.0f} %" if before else "–"


def _bar(share: float, width: int) -> str:
    """Return a bar of eighths of a column; of # where the terminal has no blocks."""
    if "utf" not in (sys.stdout.encoding or "").lower():
        return "#" * round(share * width)
    whole, eighths = divmod(round(share * width * 8), 8)
    return "█" * whole + " ▏▎▍▌▋▊▉"[eighths].strip()


def _result(bench: "StreamBench", plan: "BenchPlan", levels: "Sequence[Level]") -> dict[str, Any]:
    return {
        "url": bench.target.url,
        "endpoint": str(bench.target.endpoint),
        "model": bench.target.model,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "prompt_tokens": plan.prompt,
        "output_tokens": plan.output,
        "levels": [asdict(level) for level in levels],
    }


def _read_saved(path: Path | None) -> Any:
    """Return the figures of a file. Raises BenchError."""
    from tokenwire.load.stream_bench import BenchError

    if path is None:
        return None
    try:
        value = json.loads(path.read_text("utf-8"))
        for row in value["levels"]:
            _ = (row["streams"], row["tokens_per_second"], row["first_token"])
    except OSError as error:
        raise BenchError(f"{path} can't be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError):
        raise BenchError(f"{path} is no file of `tokenwire bench --save`.") from None
    return value


def _streams(text: str) -> tuple[int, ...]:
    read = whole_number(1, _MOST_STREAMS)
    return tuple(read(part) for part in text.split(","))
