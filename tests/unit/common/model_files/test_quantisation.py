"""Choice of a GGUF file by its quantisation, on the file names of real repositories."""

import pytest

from services.common.model_files.quantisation import (
    QuantisationError,
    choose_file,
    quantisation_of,
    quantisations_of,
)

SMOL = ["SmolLM2-135M-Instruct-Q4_K_M.gguf", "SmolLM2-135M-Instruct-Q8_0.gguf", "f16/a-f16.gguf"]


@pytest.mark.parametrize(
    ("file", "quantisation"),
    [
        ("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", "Q4_K_M"),
        ("tinyllama-1.1b-chat-v1.0.Q4_K_M.gguf", "Q4_K_M"),
        ("Qwen3-0.6B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("Q8_0/model-Q8_0-00001-of-00002.gguf", "Q8_0"),
        ("granite-4.0-350m-bf16.gguf", "BF16"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("model-IQ4_XS.gguf", "IQ4_XS"),
        ("ggml-model-f16.gguf", "F16"),
        ("Qwen3-0.6B.gguf", None),
    ],
)
def test_quantisation_is_read_from_the_name(file: str, quantisation: str | None) -> None:
    assert quantisation_of(file) == quantisation


def test_tag_in_any_case_picks_its_file() -> None:
    assert choose_file("a/b", SMOL, "q8_0") == SMOL[1]
    assert choose_file("a/b", SMOL, "F16") == SMOL[2]


def test_without_a_tag_four_bits_come_first() -> None:
    assert choose_file("a/b", SMOL, None) == SMOL[0]
    assert choose_file("a/b", ["m-Q8_0.gguf", "m-Q5_K_M.gguf", "m-F32.gguf"], None) == (
        "m-Q5_K_M.gguf"
    )
    assert choose_file("a/b", ["model.gguf"], None) == "model.gguf"


def test_split_file_counts_once_by_its_first_part() -> None:
    parts = [f"s-Q4_0-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    assert choose_file("a/b", parts, "Q4_0") == parts[0]


def test_projector_of_images_is_no_model() -> None:
    files = ["mmproj-model-F16.gguf", "model-F16.gguf"]
    assert quantisations_of(files) == {"F16": ["model-F16.gguf"]}


def test_missing_quantisation_is_refused_with_those_that_are_there() -> None:
    with pytest.raises(QuantisationError, match=r"no GGUF file Q2_K.*: Q4_K_M, Q8_0, F16\."):
        choose_file("a/b", SMOL, "Q2_K")


def test_two_models_of_one_quantisation_are_refused_by_their_names() -> None:
    with pytest.raises(QuantisationError, match=r"name one: hf:a/b/one-Q4_0\.gguf or a/b/two"):
        choose_file("a/b", ["one-Q4_0.gguf", "two-Q4_0.gguf"], "Q4_0")
