"""Records the shapes of all answers, or the answers themselves.

python -m tests.conformance.recorded                 # writes answers.jsonl anew: read its diff
python -m tests.conformance.recorded --exact FILE    # to compare two commits on one machine
"""

import argparse
import json
import tempfile
from pathlib import Path

from tests.conformance.recorded.calls import all_calls
from tests.conformance.recorded.recorder import answers
from tests.conformance.recorded.shapes import exact, shape_of
from tests.stack import served_stack
from tokenwire.serving.stack_layout import embedded_checkpoint

RECORDED = Path(__file__).parent / "answers.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.recorded")
    parser.add_argument("--exact", metavar="FILE", type=Path, help="record texts and numbers here")
    arguments = parser.parse_args()
    form = exact if arguments.exact else shape_of
    with (
        tempfile.TemporaryDirectory() as logs,
        served_stack(embedded_checkpoint(), Path(logs)) as stack,
        (arguments.exact or RECORDED).open("w") as out,
    ):
        for name, answer in answers(stack.url, all_calls(), form):
            out.write(json.dumps({"call": name} | answer, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
