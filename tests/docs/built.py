"""Checks the built manual: its search finds every error text and log line of memlane.

`make docs` runs it: python -m tests.docs.built build/docs
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from sphinx.search.en import SearchEnglish

from tests.docs.texts import texts


def main() -> int:
    index = _index(Path(sys.argv[1]))
    missed = [
        f"{origin.place}: {text}: {', '.join(lost)}"
        for text, origin in texts().items()
        if (lost := index.words_not_on("troubleshooting/every-text", text))
    ]
    print(f"{len(texts())} texts, {len(missed)} of which the search does not find")
    print(*missed, sep="\n")
    return 1 if missed else 0


class _Index:
    """Sphinx's index of words, as the search in the browser uses it."""

    def __init__(self, data: dict[str, object]) -> None:
        names: list[str] = data["docnames"]  # type: ignore[assignment]
        self.numbers = {name: number for number, name in enumerate(names)}
        self.words: dict[str, set[int]] = {}
        for terms in (data["terms"], data["titleterms"]):
            for word, where in terms.items():  # type: ignore[attr-defined]
                found = where if isinstance(where, list) else [where]
                self.words.setdefault(word, set()).update(found)
        self.language = SearchEnglish({})

    def words_not_on(self, page: str, template: str) -> list[str]:
        """The words of a text, without its placeholders, by which the page is not found."""
        number = self.numbers[page]
        text = re.sub(r"\{[^{}]*\}|%[.\d]*[dsrf]", " ", template)
        stems = {
            self.language.stem(word)
            for word in self.language.split(text.lower())
            if self.language.word_filter(word) and not word.isdecimal()
        }
        return [
            stem
            for stem in sorted(stems)
            if self.language.word_filter(stem) and number not in self.words.get(stem, set())
        ]


def _index(folder: Path) -> _Index:
    text = (folder / "searchindex.js").read_text()
    return _Index(json.loads(text[text.index("{") : text.rindex("}") + 1]))


if __name__ == "__main__":
    sys.exit(main())
