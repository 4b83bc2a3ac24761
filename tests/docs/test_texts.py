"""Every error text and log line of memlane is in the manual, and nothing else is."""

from __future__ import annotations

import re

from tests.docs.manual import ENGINE_LINES, OWN_TEXTS, ROOT, TROUBLESHOOTING, literal_lines
from tests.docs.texts import texts


def test_every_text_has_an_entry() -> None:
    """What memlane may say stands verbatim in a `text` block of docs/troubleshooting."""
    shown = {line for page in OWN_TEXTS for line in literal_lines(page)}
    missing = [f"{place}: {text}" for text, place in texts().items() if text not in shown]
    assert not missing, "add to docs/troubleshooting:\n" + "\n".join(missing)


def test_every_entry_is_a_text() -> None:
    """An entry that no code says any more is removed."""
    known = texts()
    stale = [
        f"{page.relative_to(ROOT)}: {line}"
        for page in OWN_TEXTS
        for line in literal_lines(page)
        if line not in known
    ]
    assert not stale, "no code says this:\n" + "\n".join(stale)


def test_every_entry_says_what_to_do() -> None:
    """Behind each block of texts stand a cause and a remedy; descriptions within lines have
    at least the first."""
    for page in OWN_TEXTS:
        for entry in re.split(r"^```text\n", page.read_text(), flags=re.MULTILINE)[1:]:
            explanation = re.split(r"^```$|^#", entry, flags=re.MULTILINE)[1]
            assert len(explanation.split()) >= 5, f"{page.name}: {entry}"
    remedies = sum(page.read_text().count("**What to do:**") for page in OWN_TEXTS)
    entries = sum(page.read_text().count("```text") for page in OWN_TEXTS)
    assert remedies >= entries - 2


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
