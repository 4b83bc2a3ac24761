"""The programs shown in the README and in the manual's first pages."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
START = ROOT.glob("docs/start/*.md")
_SHOWN = {
    path: re.findall(r"```python\n(.*?)```", (ROOT / path).read_text(), re.DOTALL)
    for path in ("README.md", *sorted(str(page.relative_to(ROOT)) for page in START))
}
EXAMPLES = {
    f"{path}-{number}": text
    for path, texts in _SHOWN.items()
    for number, text in enumerate(texts, start=1)
}
