"""Prints what the named extras of pyproject.toml require, so that images cache it in a layer.

An extra's own extras are named beside it: `engine gpu`.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
requirements = list(project["dependencies"])
for extra in sys.argv[1:]:
    named = project["optional-dependencies"][extra]
    requirements += [each for each in named if not each.startswith(project["name"])]
print("\n".join(requirements))
