"""Configures how Sphinx builds the manual; `make docs` runs it."""

import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

from sphinx.application import Sphinx

import memlane
from memlane import errors
from memlane.metrics.catalogue import METRICS

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # for tests.docs.texts
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPOSITORY = PROJECT["urls"]["Source"]

project = "memlane"
author = "the memlane authors"
copyright = author
version = release = memlane.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_design"]
exclude_patterns = ["_build"]
needs_sphinx = "7.4"

smartquotes_action = "D"  # dashes, but no quotes
# Text: Markdown. A relative link to a file that is no page is a download.
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

# The API reference: from docstrings, in which `x` is code.
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_mock_imports = ["ray"]
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]
napoleon_use_rtype = False
maximum_signature_line_length = 80
toc_object_entries_show_parents = "hide"
python_use_unqualified_type_names = True
# Types of other packages have no page here.
# Nor have memlane's own internals.
nitpick_ignore_regex = [
    (r"py:.*", r"(?!memlane\b).*"),
    (r"py:.*", r"memlane\.(_.*|groups\.stores\..*|store\.(reading|serde)\..*)"),
    (r"py:.*", r"memlane\.(broadcast\.any_queue\.M|tiers\.tier\.Ticket)"),
    (r"py:.*", r"memlane\.workers\.(\w+\.[A-Z]|call\.CallingGroup|table\.Pending)"),
]

# Links within the manual are checked by every build, others by `make docs-links` only.
linkcheck_ignore = [REPOSITORY]  # a placeholder until the repository is public

html_theme = "furo"
html_title = f"memlane {release}"
html_static_path = ["_static"]
html_css_files = ["manual.css"]
html_js_files = ["manual.js"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {
    "source_repository": REPOSITORY,
    "source_branch": "main",
    "source_directory": "docs/",
}
highlight_language = "none"
pygments_style = "friendly"
pygments_dark_style = "github-dark"


def fill(_app: Sphinx, name: str, source: list[str]) -> None:
    """Adds what the code says already: every text, every metric, every error; and the sidebar."""
    if name in FILLED:
        source[0] += FILLED[name](source[0])


def _every_text(_page: str) -> str:
    from tests.docs.texts import page

    return page()


def _lines(_page: str) -> str:
    entries = tomllib.loads((ROOT / "docs/troubleshooting/lines.toml").read_text())
    shown = []
    for heading, group in entries.items():
        shown.append(f"\n## {heading}\n")
        for entry in group:
            lines = "\n".join(entry["lines"])
            shown.append(f"```text\n{lines}\n```\n\n{entry['text']}\n")
    return "\n".join(shown)


def _sidebar(page: str) -> str:
    """The page's list of all pages, as tables of contents."""
    contents = []
    for caption, links in re.findall(r"^\* \*\*(.*)\*\*: (.*)$", page, re.MULTILINE):
        names = "\n".join(re.findall(r"\((\S+)\.md\)", links))
        contents.append(f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{names}\n```\n")
    return "\n".join(["", *contents])


def _metrics(_page: str) -> str:
    rows = ["| metric | kind | labels | what |", "|---|---|---|---|"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n" + "\n".join(rows) + "\n"


def _errors(_page: str) -> str:
    shown = {name: kind for name, kind in vars(errors).items() if name in memlane.__all__}
    options = [
        f":{'no-members' if issubclass(kind, tuple) else 'show-inheritance'}:"
        for kind in shown.values()
    ]
    lines = [
        f".. autoclass:: memlane.{name}\n   {option}"
        for name, option in zip(shown, options, strict=True)
    ]
    return "\n".join(["\n```{eval-rst}", ".. currentmodule:: memlane", *lines, "```\n"])


def _contents(page: str) -> str:
    """The pages that a page links to in its own folder, or in the one with its name."""
    names = dict.fromkeys(re.findall(r"\(((?:benchmarks/)?[\w-]+)\.md\)", page))
    return "\n".join(["", "```{toctree}", ":hidden:", "", *names, "```", ""])


FILLED: dict[str, Callable[[str], str]] = {
    "index": _sidebar,
    "benchmarks": _contents,
    "reference/api/index": _contents,
    "troubleshooting/index": _contents,
    "troubleshooting/every-text": _every_text,
    "troubleshooting/lines": _lines,
    "reference/metrics": _metrics,
    "reference/api/errors": _errors,
}


def leave_design_out_of_search(app: Sphinx, _tree: object) -> None:
    """Its words are also those of errors and calls, which people search for."""
    name = app.env.docname
    if name.startswith("design/") and name != "design/security":
        app.env.metadata[name]["nosearch"] = "true"


def setup(app: Sphinx) -> None:
    app.connect("source-read", fill)
    app.connect("doctree-read", leave_design_out_of_search)
