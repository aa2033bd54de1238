"""Two ranks with drafts give the answers of one rank without."""

import json
import multiprocessing
from dataclasses import replace

import pytest

from services.engine.engine import Engine
from services.engine.ranks.rank import Rank
from services.engine.settings import EngineSettings
from tests.stack import free_ports
from tests.unit.engine.eagle import make_eagle
from tests.unit.engine.mtp import make_mtp
from tests.unit.engine.ranks.rank_drafts import Answers, answer, run_rank
from tests.unit.engine.tiny import make_checkpoint

SOURCES = {
    "draft model": "draft_model",
    "eagle": "eagle",
    "mtp": "mtp",
    "by default": "mtp",
    "mtp, 3 layers": "mtp",
}
SETTINGS = EngineSettings(dtype="float32", device="cpu", kv_memory="4MiB", max_running=4)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineSettings]:
    folder = tmp_path_factory.mktemp("drafts")
    model, draft = make_checkpoint(folder / "model"), make_checkpoint(folder / "draft")
    head = make_eagle(folder / "head", model)
    make_mtp(folder / "mtp", "glm4 moe")
    make_mtp(folder / "layers", "glm4 moe", 3)
    plain = replace(SETTINGS, model=model)
    return {
        "draft model": replace(plain, draft=str(draft)),
        "eagle": replace(plain, draft=str(head)),
        "mtp": replace(SETTINGS, model=folder / "mtp", speculate="mtp"),
        "by default": replace(SETTINGS, model=folder / "mtp"),
        "mtp, 3 layers": replace(SETTINGS, model=folder / "layers", speculate="mtp"),
    }


@pytest.fixture(scope="module")
def by_two(
    engines: dict[str, EngineSettings], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Answers]:
    """Answers of each engine on two ranks."""
    out = tmp_path_factory.mktemp("answers") / "answers.json"
    [port] = free_ports(1)
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=run_rank, args=(Rank(n, 2, n, 2), port, engines, out))
        for n in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    return {name: Answers(*found) for name, found in json.loads(out.read_text()).items()}


@pytest.mark.parametrize("name", SOURCES)
def test_two_ranks_draft_and_give_the_answers_of_one_without_drafts(
    name: str, engines: dict[str, EngineSettings], by_two: dict[str, Answers]
) -> None:
    settings = replace(engines[name], draft="", speculate="off")
    with Engine(settings.model, settings) as engine:
        expected = answer(engine)
    found = by_two[name]
    assert found.tokens == expected.tokens
    assert list(found.drafted) == [SOURCES[name]]
    assert found.drafted[SOURCES[name]] > 0
    assert found.block_bytes > expected.block_bytes
