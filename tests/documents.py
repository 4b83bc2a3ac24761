"""The programs shown in the README and the guide."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
_SHOWN = {
    path: re.findall(r"```python\n(.*?)```", (ROOT / path).read_text(), re.DOTALL)
    for path in ("README.md", "docs/guide.md")
}
EXAMPLES = {
    f"{path}-{number}": text
    for path, texts in _SHOWN.items()
    for number, text in enumerate(texts, start=1)
}
