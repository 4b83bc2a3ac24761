"""Every error text and log line of memlane has its place in the manual, which says of those that
people meet what to do; and it shows none that no code says."""

from __future__ import annotations

import ast
import re

from memlane import errors
from tests.docs.manual import ENGINE_LINES, ENTRIES, LINES, TROUBLESHOOTING
from tests.docs.texts import LOG, PART, ROOT, page, pattern, texts

OPENINGS = (
    "Of",
    "What",
    "Whether",
    "How",
    "Which",
    "Who",
    "Whoever",
    "Whose",
    "Where",
    "When",
    "Why",
)
"""Words that begin a question or a clause without its verb, not a statement."""


def test_every_text_has_its_place() -> None:
    """Verbatim, below the error that it belongs to."""
    shown = page()
    found = set(shown.splitlines())
    assert texts().keys() <= found
    headings = set(re.findall(r"^## (.*)$", shown, re.MULTILINE))
    assert {LOG, PART, "ReaderDied", "ShmExhausted"} <= headings
    assert {"InvalidArgument", "Closed"} <= headings & vars(errors).keys()


def test_every_line_is_one_that_the_code_says() -> None:
    """A line that people meet holds a text, with something in its places; one that no code says
    any more is removed."""
    known = [pattern(text) for text in texts() if len(re.findall(r"[A-Za-z]{2,}", text)) >= 2]
    assert len(LINES) >= 40
    stale = [line for line in LINES if not any(text.search(line) for text in known)]
    assert not stale, "no code says this:\n" + "\n".join(stale)


def test_lines_are_real() -> None:
    """They show what a user sees: values, not placeholders."""
    assert not [line for line in LINES if re.search(r"[{}]|%[sdr]", line)]


def test_every_entry_says_what_to_do() -> None:
    """Behind each of their lines stand a cause, unless the line has it, and a remedy."""
    for entry in ENTRIES:
        assert "**What to do:**" in entry["text"], entry


def test_lines_of_engines_are_titles() -> None:
    """Each line of today's engines has a page of its own, with the line in its title."""
    titles = {
        page.name: page.read_text().split("\n", 1)[0]
        for page in TROUBLESHOOTING
        if page.name in ENGINE_LINES
    }
    assert set(titles) == ENGINE_LINES
    for line in (
        "No available shared memory broadcast block found in 60 seconds",
        "resource_tracker: There appear to be N leaked shared_memory objects",
        "shared_memory objects to clean up at shutdown",
        "Bus error",
        "FileExistsError: [Errno 17] File exists: '/VLLM_OBJECT_STORAGE_SHM_BUFFER'",
        "Insufficient space in /dev/shm for",
        "RPC call to ... timed out",
        "No available block found in",
    ):
        assert any(line in title for title in titles.values()), line


def test_every_docstring_opens_with_a_statement() -> None:
    """It has a subject, or a verb in the third person, and asks nothing."""
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {first}"
        for folder in ("src", "tests", "benchmarks", "examples", "verification", "release", "docs")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(text := node.value.value, str)
        if (first := " ".join(text.strip().split("\n\n")[0].split()))
        if re.match(rf"({'|'.join(OPENINGS)}|None(:| if| while))\b", first) or first.endswith("?")
    ]
    assert not wrong, "\n".join(wrong)
