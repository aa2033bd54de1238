"""An engine that drafts with the MTP layers of its checkpoint gives the same answers."""

from dataclasses import replace
from pathlib import Path

import pytest

from services.common.model_files.checkpoint import opened_checkpoint
from services.common.settings import StartupError
from services.engine.engine import Engine
from services.engine.settings import EngineSettings
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.files import make_checkpoint as make_family
from tests.unit.engine.fp8_checkpoints import LAYOUTS, LEFT_OUT
from tests.unit.engine.mtp import FORMATS, make_mtp, quantize_mtp, write_mtp_gguf
from tests.unit.engine.tiny import make_checkpoint

SETTINGS = EngineSettings(dtype="float32", device="cpu", kv_memory="16MiB", max_running=4)


_SEVERAL = [("deepseek v3", 2), ("glm4 moe", 3), ("mimo", 2), ("mimo v2 flash", 3)]


@pytest.mark.parametrize(("family", "layers"), [*((each, 1) for each in FORMATS), *_SEVERAL])
def test_mtp_layers_keep_the_answers_and_are_counted(
    family: str, layers: int, tmp_path: Path
) -> None:
    """The layers have random weights, so few draft tokens are accepted."""
    make_mtp(tmp_path, family, layers)
    check_answers(tmp_path)


@pytest.mark.parametrize(
    ("family", "layout", "left_out"),
    [
        ("deepseek v3", "blocks", "eh_proj"),
        ("glm4 moe", "channels", "eh_proj"),
        ("qwen3 next", "blocks", "mtp."),
    ],
)
def test_mtp_layers_of_fp8_checkpoints_keep_the_answers_and_are_counted(
    family: str, layout: str, left_out: str, tmp_path: Path
) -> None:
    parts = make_mtp(tmp_path, family)
    kept = (*LEFT_OUT, "mlp.shared_expert_gate", left_out)
    quantize_mtp(tmp_path, family, parts, LAYOUTS[layout], kept)
    check_answers(tmp_path)


def check_answers(model: Path) -> None:
    """Require that MTP layers draft tokens, and that answers are those without drafts."""
    answers, counts = [], []
    for speculate in ("off", "mtp", "auto"):
        with Engine(model, replace(SETTINGS, speculate=speculate)) as engine:
            answers.append(
                [
                    engine.generate(
                        [5, 7, 11, token], max_tokens=40, temperature=0, ignore_eos=True
                    ).token_ids
                    for token in (1, 2, 3)
                ]
            )
            counts.append(engine.loaded.steps.take_output().load.drafts)
    assert answers[0] == answers[1] == answers[2]
    assert counts[0] == ()
    for [count] in counts[1:]:
        assert count.source == "mtp"
        assert count.drafted > 0


def test_mtp_layer_of_a_gguf_file_drafts_unless_a_tensor_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parts = make_mtp(tmp_path, "glm4 moe")
    answers = []
    for without, speculate in (("", "off"), ("", "auto"), ("eh_proj", "auto"), ("eh_proj", "mtp")):
        path = tmp_path / f"model{without}.gguf"
        write_mtp_gguf(path, parts, without=without)
        settings = replace(SETTINGS, speculate=speculate)
        with opened_checkpoint(path) as directory:
            if speculate == "mtp":
                with pytest.raises(StartupError, match=r"no file holds the tensor .*eh_proj"):
                    Engine(directory, settings)
                continue
            with Engine(directory, settings) as engine:
                done = engine.generate([5, 7], max_tokens=20, temperature=0, ignore_eos=True)
                answers.append(done.token_ids)
                counts = engine.loaded.steps.take_output().load.drafts
        assert [each.source for each in counts] == ["mtp"] * (speculate == "auto" and not without)
    assert answers[0] == answers[1] == answers[2]
    assert "the MTP layer makes no draft tokens" in caplog.text


def test_models_without_an_mtp_layer_are_refused(tmp_path: Path) -> None:
    settings = replace(SETTINGS, speculate="mtp")
    with pytest.raises(
        StartupError, match=r"^--speculate mtp: no file of the model holds an MTP layer\.[^\n]*$"
    ):
        Engine(make_checkpoint(tmp_path / "llama"), settings)
    make_family(tmp_path / "gpt2", CONFIGS["gpt2"])
    with pytest.raises(StartupError, match="--speculate mtp: a head reads hidden states"):
        Engine(tmp_path / "gpt2", settings)


def test_mtp_layer_beside_a_draft_model_is_refused() -> None:
    with pytest.raises(StartupError, match="--speculate mtp ignores it"):
        EngineSettings(speculate="mtp", draft="small")
