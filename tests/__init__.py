"""The tests, which may import what is in `examples`, too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "examples"))
