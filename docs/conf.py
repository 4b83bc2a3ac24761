"""How Sphinx builds the manual; `make docs` runs it."""

import sys
import tomllib
from pathlib import Path

from sphinx.application import Sphinx

import memlane

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
    (r"py:.*", r"memlane\.workers\.(\w+\.[A-Z]|call\.Receiver|table\.Pending)"),
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


def add_texts(_app: Sphinx, name: str, source: list[str]) -> None:
    """Adds every text of the source to the page of them."""
    if name == "troubleshooting/every-text":
        from tests.docs.texts import page

        source[0] += page()


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_texts)
