"""Logs: what somebody looks at to find out what became of a request."""

import json
from pathlib import Path

import httpx

from tests.services.shim import running_shim
from tests.stack import running_service

TRACE = "0af7651916cd43dd8448eb211c80319c"


async def test_a_trace_is_found_in_the_log_of_every_service(
    embedded_model: Path, tmp_path: Path
) -> None:
    model = ("--model", str(embedded_model))
    logs = {name: tmp_path / f"{name}.log" for name in ("grammar", "engine", "tokenizer")}
    few = ("--dtype", "float32", "--kv-memory", "64MiB")
    async with (
        running_service("grammar", *model, log=logs["grammar"]) as grammar,
        running_service(
            "engine", *model, *few, "--grammar", grammar.target, log=logs["engine"]
        ) as engine,
        running_service(
            "tokenizer", *model, "--engine", engine.target, log=logs["tokenizer"]
        ) as tokenizer,
        running_shim("--tokenizer", tokenizer.target) as shim,
        httpx.AsyncClient(base_url=shim.url) as http,
    ):
        body = {
            "model": "tokenwire-code-6m",
            "prompt": "x = ",
            "max_tokens": 4,
            "grammar": {"type": "regex", "value": "[0-9]+"},
        }
        names = {"x-request-id": "traced", "traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
        answer = await http.post("/v1/completions", json=body, headers=names)
        assert answer.status_code == 200
        assert (await shim.answered("traced"))["trace_id"] == TRACE
        body["prompt"] = "y = "
        untraced = {"x-request-id": "untraced", "traceparent": "not a trace"}
        assert (await http.post("/v1/completions", json=body, headers=untraced)).is_success
        assert "trace_id" not in await shim.answered("untraced")
    for log in logs.values():
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        named = {
            identity: [line for line in lines if line.get("request_id") == identity]
            for identity in ("traced", "untraced")
        }
        assert named["traced"]
        assert all(line["trace_id"] == TRACE for line in named["traced"])
        assert not any("trace_id" in line for line in named["untraced"])
