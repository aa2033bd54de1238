"""Deferred modules of torch: they cost a start nothing, and work where they are used."""

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import GPTNeoXConfig

from tests.unit.engine.checkpoints.files import make_checkpoint
from tests.unit.engine.checkpoints.shapes import SHAPE

_DEFERRED = """
import sys
from services.engine.deferred_modules import defer_torch_modules
defer_torch_modules()
"""
_STARTED = _DEFERRED + "import services.engine.loop.loop_process, torch\n"


def _run(program: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-c", program, *arguments], check=True, timeout=120)


@pytest.mark.parametrize(
    "module", ["torch._meta_registrations", "torch.export", "torch.utils.data"]
)
def test_engine_starts_without_modules_that_it_does_not_use(module: str) -> None:
    """They would lengthen each start and restart of an engine by half a second."""
    _run(f"{_STARTED}sys.exit('__getattr__' not in vars(sys.modules[{module!r}]))")


def test_deferred_module_loads_when_it_is_used() -> None:
    _run(
        f"{_STARTED}"
        "from torch.utils.data import *\n"
        "assert len(TensorDataset(torch.ones(3))) == 3\n"
        "assert torch.distributions.Normal(0.0, 1.0).mean == 0\n"
        "assert not hasattr(torch.export, 'nothing')\n"
        "assert torch.export.Dim('rows').__name__ == 'rows'\n"
    )


def test_model_on_the_code_of_transformers_loads(tmp_path: Path) -> None:
    """Its trial pass computes shapes with deferred operators, and would refuse the model."""
    make_checkpoint(tmp_path, GPTNeoXConfig(**SHAPE))
    _run(
        f"{_DEFERRED}"
        "import torch\n"
        "from pathlib import Path\n"
        "from services.engine.execution.model_loader import load_any_model\n"
        "load_any_model(Path(sys.argv[1]), torch.float32, 'transformers')\n",
        str(tmp_path),
    )
