"""The tests. They may import `examples` as well."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "examples"))
