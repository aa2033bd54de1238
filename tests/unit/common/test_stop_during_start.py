"""End of a service that is stopped while it prepares its checkpoint."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path


def test_a_stopped_start_leaves_no_folder(embedded_model: Path, tmp_path: Path) -> None:
    """Models on demand are unloaded during loads: the disk would fill with copies of tokenizers."""
    model, temporary = tmp_path / "model", tmp_path / "temporary"
    model.mkdir()
    temporary.mkdir()
    shutil.copy(embedded_model / "config.json", model)
    (model / "tokenizer.model").touch()
    os.mkfifo(model / "tokenizer_config.json")  # its reader waits for a writer, which never comes
    process = subprocess.Popen(
        [sys.executable, "-m", "services.tokenizer", "--model", str(model), "--port", "0"],
        env=os.environ | {"TMPDIR": str(temporary)},
    )
    try:
        end = time.monotonic() + 60
        while not any(temporary.iterdir()):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.01)  # nothing tells of a new folder
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    assert not any(temporary.iterdir())
