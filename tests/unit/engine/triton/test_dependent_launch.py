"""Launches start while the kernel before ends, where the GPU and the operator allow it."""

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from services.engine.kernels import dependent_launch
from services.engine.kernels.dependent_launch import launch_options, use_dependent_launch
from tests.unit.engine.triton.gpus import reads_before_wait

GPU = torch.device("cuda")
DEPENDENT = {"is_dependent": True, "launch_pdl": True}
ORDINARY = {"is_dependent": False}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    dependent_launch.has_dependent_launch.cache_clear()
    use_dependent_launch(True)
    yield
    dependent_launch.has_dependent_launch.cache_clear()
    use_dependent_launch(False)


@pytest.mark.parametrize(
    ("capability", "hip", "options"),
    [
        ((8, 0), None, ORDINARY),
        ((8, 9), None, ORDINARY),
        ((9, 0), None, DEPENDENT),
        ((12, 0), None, DEPENDENT),
        ((9, 4), "6.4", ORDINARY),
    ],
)
def test_launches_are_dependent_where_the_gpu_and_the_operator_allow(
    capability: tuple[int, int],
    hip: str | None,
    options: dict[str, bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another GPU would refuse the instructions, and AMD's Triton the option."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert launch_options(GPU) == options
    assert launch_options(torch.device("cpu")) == ORDINARY
    use_dependent_launch(False)
    assert launch_options(GPU) == ORDINARY


HEAD = ".visible .entry k()\n.reqntid 128\n{\nld.param.b64 %rd1, [k_param_0];\n"
READ = "add.s64 %rd2, %rd1, 8;\n@%p1 ld.global.b32 { %r1 }, [ %rd2 + 0 ];\n"
WAIT = "griddepcontrol.wait;\n"


def test_reads_before_the_wait_are_found() -> None:
    """The tests of all kernels rely on it."""
    assert list(reads_before_wait(HEAD + READ + WAIT, ("rows",))) == ["rows"]
    assert not list(reads_before_wait(HEAD + WAIT + READ, ("rows",)))


@pytest.mark.parametrize(
    "text", ["", "@%p1 bra $L1;\n" + WAIT, "st.global.b32 [%rd1], 0;\n" + WAIT]
)
def test_kernel_that_may_not_wait_or_writes_before_is_refused(text: str) -> None:
    with pytest.raises(AssertionError):
        list(reads_before_wait(HEAD + text, ("rows",)))
