"""The targets of the Makefile, which documents and workflows name."""

import re
from pathlib import Path

_MAKEFILE = Path(__file__).parents[2] / "Makefile"
TARGETS = {
    name
    for names in re.findall(r"^([\w -]+):(?!=)", _MAKEFILE.read_text(), re.MULTILINE)
    for name in names.split()
}
