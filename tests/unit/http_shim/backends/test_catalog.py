"""Catalogs with thousands of models, and catalogs that change."""

import asyncio
import json
from pathlib import Path

import pytest
from starlette.requests import Request

from services.http_shim.backends.backend import BackendSettings
from services.http_shim.backends.catalog import Catalog
from services.http_shim.endpoints.models import Models

MANY = 5_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    rows = [
        f'[[models]]\nid = "m{i}"\nplaceholder = true\n[models.variants.v]\ncontext = 5\n'
        for i in range(MANY)
    ]
    written = tmp_path / "catalog.toml"
    written.write_text("".join(rows))
    return written


async def test_long_model_list_yields_to_the_event_loop(path: Path) -> None:
    """Otherwise all streams would stall while the list is made."""
    models = Models(Catalog(path, BackendSettings()))
    listing = asyncio.ensure_future(models.all(Request({"type": "http"})))
    turns = 0
    while not listing.done():
        await asyncio.sleep(0)
        turns += 1
    cards = json.loads(bytes(listing.result().body))["data"]
    assert [card["id"] for card in cards] == [f"m{i}" for i in range(MANY)]
    assert cards[-1]["variants"] == [f"m{MANY - 1}:v"]
    assert turns > MANY / 500


async def test_model_list_survives_the_removal_of_a_model(tmp_path: Path) -> None:
    """A reload may close a backend between the request for the list and its answer."""
    path = tmp_path / "catalog.toml"
    path.write_text('[[models]]\nid = "old"\ntarget = "127.0.0.1:1"\n')
    catalog = Catalog(path, BackendSettings())
    listing = asyncio.ensure_future(catalog.listed())
    await asyncio.sleep(0)
    path.write_text('[[models]]\nid = "new"\nplaceholder = true\n')
    catalog.reload()
    [listed] = await listing
    assert (listed.row.id, listed.model) == ("old", None)
    await catalog.close()
