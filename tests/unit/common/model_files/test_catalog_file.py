"""Catalog file: valid content, and errors in one sentence."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.model_files.catalog_file import (
    CatalogError,
    CatalogModel,
    read_catalog,
    write_catalog,
)

FULL = """
[[models]]
id = "acme/large"
aliases = ["large", "gpt"]
target = "10.0.0.7:50051"
max_output_length = 4096
context = 8192
owned_by = "acme 😀"
created = 1700000000

[models.variants.int8]
target = "10.0.0.8:50051"

[models.variants."short.1"]
max_output_length = 16

[[models]]
id = "small"
path = "models/small"
dtype = "float32"
engine_args = "--kv-memory 1GiB"
chat_template = "own.jinja"

[[models]]
id = "small-sql"
aliases = ["sql"]
adapter_of = "small"
path = "adapters/sql"
context = 100

[[models]]
id = "large-sql"
adapter_of = "acme/large"

[[models]]
id = "soon"
placeholder = true
"""


@pytest.fixture
def catalog(tmp_path: Path) -> Path:
    return tmp_path / "catalog.toml"


def test_catalog_resolves_ids_aliases_and_variants(catalog: Path) -> None:
    catalog.write_text(FULL)
    large, int8, short, small, small_sql, large_sql, soon = read_catalog(catalog)
    assert large == CatalogModel(
        id="acme/large",
        names=("acme/large", "large", "gpt"),
        target="10.0.0.7:50051",
        max_output_length=4096,
        context=8192,
        owned_by="acme 😀",
        created=1700000000,
    )
    assert int8.names == ("acme/large:int8", "large:int8", "gpt:int8")
    assert (int8.id, int8.target, int8.max_output_length) == ("acme/large", "10.0.0.8:50051", 4096)
    assert (short.target, short.max_output_length) == (large.target, 16)
    assert small.path == catalog.parent / "models/small"
    assert (small.dtype, small.engine_args) == ("float32", "--kv-memory 1GiB")
    assert small.chat_template == catalog.parent / "own.jinja"
    assert small_sql.names == ("small-sql", "sql")
    assert (small_sql.path, small_sql.context) == (catalog.parent / "adapters/sql", 100)
    assert small.adapters == (("small-sql", catalog.parent / "adapters/sql"),)
    assert (large_sql.target, large_sql.adapter_of) == (large.target, "acme/large")
    assert large.adapters == ()
    assert [model.is_placeholder for model in (large, small, soon)] == [False, False, True]


def test_written_catalog_reads_back_equal(catalog: Path) -> None:
    """The supervisor writes the shim a catalog with the targets that it chose."""
    near = 'target = "127.0.0.1:1"\npeer_token_file = "token"'
    catalog.write_text(FULL.replace('path = "models/small"', near)
                       .replace('dtype = "float32"', "")
                       .replace('engine_args = "--kv-memory 1GiB"', "")
                       .replace('path = "adapters/sql"', "")
                       .replace('chat_template = "own.jinja"', ""))  # fmt: skip
    models = read_catalog(catalog)
    written = catalog.with_name("written.toml")
    write_catalog(written, models)
    assert read_catalog(written) == models


@given(owner=st.text(st.characters(codec="utf-8"), max_size=20))
def test_any_owner_reads_back_equal(tmp_path_factory: pytest.TempPathFactory, owner: str) -> None:
    path = tmp_path_factory.getbasetemp() / "owner.toml"
    models = (CatalogModel(id="m", names=("m",), target="h:1", owned_by=owner),)
    write_catalog(path, models)
    assert read_catalog(path) == models


ONE = '[[models]]\nid = "m"\n'
ADAPTER = '[[models]]\nid = "a"\nadapter_of = "m"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "models"),
        ("models = []", "length"),
        ("models = 3", "array"),
        ("x = [", "wrong"),
        ("[[models]]\ntarget = 'h:1'", "`id`"),
        (ONE, "model m needs one of target, path and placeholder"),
        (ONE + 'target = "h:1"\nplaceholder = true', "needs one of"),
        (ONE + 'target = "h:1"\npath = "p"', "both target and path"),
        (ONE + 'target = "nowhere"', "host:port"),
        (ONE + 'target = "h:99999"', "host:port"),
        (ONE + 'path = "p"\npeer_token_file = "t"', "peer_token_file of model m needs a target"),
        (
            ONE + 'target = "h:1"\npeer_token_file = "t"\n[models.variants.v]\n'
            'peer_token_file = "u"',
            "the target h:1 has several values of peer_token_file",
        ),
        (ONE + 'target = "h:1"\ncolour = "red"', "colour"),
        (ONE + 'target = "h:1"\nmax_output_length = 0', "max_output_length"),
        (ONE + 'target = "h:1"\nmax_output_length = true', "max_output_length"),
        (ONE + 'target = "h:1"\ndtype = "float32"', "need a path"),
        (ONE + 'target = "h:1"\naliases = ["m"]', "m occurs twice"),
        (ONE + 'target = "h:1"\naliases = ["default"]', "default"),
        (ONE + 'target = "h:1"\naliases = ["with space"]', "aliases"),
        (ONE + 'target = "h:1"\n[models.variants."a b"]', "variants"),
        (ONE + 'target = "h:1"\naliases = ["m:v"]\n[models.variants.v]', "m:v occurs twice"),
        (ONE + 'target = "h:1"\n' + ONE + "placeholder = true", "m occurs twice"),
        (ONE + 'adapter_of = "n"', "n, the model of m, is not served here"),
        (ONE + 'adapter_of = "m"', "m, the model of m, is not served here"),
        (ADAPTER + ONE + "placeholder = true", "m, the model of a, is not served here"),
        (ADAPTER + ONE + 'path = "p"', "the adapter a needs a path: its model has a path"),
        (ADAPTER + 'path = "a"\n' + ONE + 'target = "h:1"', "a can't have a path: its model has a"),
        (ADAPTER + 'target = "h:1"\n' + ONE + 'target = "h:1"', "the adapter a can't have target"),
        (ADAPTER + 'dtype = "float32"\n' + ONE + 'target = "h:1"', "the adapter a can't have"),
        ("a = " + "[" * 10_000, "nested"),
        ("a = " + "9" * 10_000, "wrong"),
    ],
)
def test_wrong_catalog_is_refused_in_one_sentence(catalog: Path, text: str, message: str) -> None:
    catalog.write_text(text)
    with pytest.raises(CatalogError) as caught:
        read_catalog(catalog)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_documented_catalog_is_valid(catalog: Path) -> None:
    documented = Path(__file__).parents[4] / "docs/running.md"
    catalog.write_text(
        "[[models]]"
        + documented.read_text().partition("```toml\n[[models]]")[2].partition("```")[0]
    )
    assert [model.full_name for model in read_catalog(catalog)] == [
        "small",
        "small:int8",
        "small-sql",
        "acme/large",
        "acme/soon",
    ]


def test_unreadable_catalog_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.toml"):
        with pytest.raises(CatalogError, match="can't be read"):
            read_catalog(path)
    (tmp_path / "latin.toml").write_bytes(b"a = '\xff'")
    with pytest.raises(CatalogError, match="UTF-8"):
        read_catalog(tmp_path / "latin.toml")


_VALUES = st.recursive(
    st.one_of(
        st.text(max_size=5).map(repr), st.integers().map(str), st.floats().map(str),
        st.sampled_from(["true", "false", "1979-05-27", '"h:1"', "''", "{}", "[]"]),
    ),
    lambda values: st.lists(values, max_size=3).map(lambda each: f"[{', '.join(each)}]"),
)  # fmt: skip
_NAMES = st.sampled_from(
    ["id", "aliases", "target", "path", "placeholder", "dtype", "engine_args", "chat_template",
     "max_output_length", "context", "adapter_of", "owned_by", "created", "variants", "models",
     "other"]
)  # fmt: skip
_LINES = st.one_of(
    st.tuples(_NAMES, _VALUES).map(" = ".join),
    st.sampled_from(
        ["[[models]]", "[models.variants.v]", "[models]", 'id = "a"', 'target = "h:1"']
    ),
    st.text(max_size=10),
)


@given(lines=st.lists(_LINES, max_size=12))
def test_any_text_is_a_catalog_or_one_sentence(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str]
) -> None:
    """A typo must not end a server with a traceback."""
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes("\n".join(lines).encode("utf-8", "replace"))
    sentence = ""
    try:
        models = read_catalog(path)
    except CatalogError as error:
        models, sentence = (), str(error)
    assert models or len(sentence.splitlines()) == 1
