"""The README as PyPI shows it; scikit-build-core calls `dynamic_metadata` for every build.

Links into the repository lead to the tag of the version that is built. The repository's address is
`project.urls.Source` in pyproject.toml.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
_TARGET = re.compile(
    r"""(?P<before>\]\( | ^\[[^\]]+\]:\s+ | \b(?:src|srcset|href)=["']) (?P<target>[^\s"')]+)""",
    re.MULTILINE | re.VERBOSE,
)
_HAS_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*:|//", re.IGNORECASE)
_PICTURE = re.compile(r"\.(?:gif|jpe?g|png|svg|webp)$", re.IGNORECASE)


def dynamic_metadata(
    field: str, settings: Mapping[str, Any], project: Mapping[str, Any]
) -> dict[str, str]:
    """scikit-build-core's protocol: the value of `project.readme`."""
    if field != "readme" or settings:
        raise ValueError("project_page provides `readme`, and has no settings")
    text = Path("README.md").read_text(encoding="utf-8")
    page = absolute(text, project["urls"]["Source"], f"v{project['version']}")
    return {"content-type": "text/markdown", "text": page}


def targets(text: str) -> list[str]:
    """The targets of all links and pictures, outside code."""
    prose = _CODE.split(text)[::2]
    return [found["target"] for part in prose for found in _TARGET.finditer(part)]


def absolute(text: str, source: str, tag: str) -> str:
    """The same text; links into the repository `source` have its address and the tag."""

    def rewritten(found: re.Match[str]) -> str:
        return found["before"] + _absolute(found["target"], source, tag)

    parts = _CODE.split(text)
    parts[::2] = [_TARGET.sub(rewritten, part) for part in parts[::2]]
    return "".join(parts)


def _absolute(target: str, source: str, tag: str) -> str:
    if _HAS_ADDRESS.match(target):
        return target
    if target.startswith("#"):  # PyPI gives headings other names
        target = f"README.md{target}"
    kind = "raw" if _PICTURE.search(target) else "blob"
    return f"{source}/{kind}/{tag}/{target}"
