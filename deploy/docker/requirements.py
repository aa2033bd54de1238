"""Requirements of extras in pyproject.toml, printed so that images cache them in a layer.

Name the extras that an extra includes, too: `engine gpu`.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
requirements = list(project["dependencies"])
for extra in sys.argv[1:]:
    packages = project["optional-dependencies"][extra]
    requirements += [each for each in packages if not each.startswith(project["name"])]
print("\n".join(requirements))
