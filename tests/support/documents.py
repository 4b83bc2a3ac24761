"""The programs shown in the README and in the manual's first pages."""

from pathlib import Path

from tests.docs.manual import programs

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/start/*.md"))]
EXAMPLES = {
    program.name: program.text
    for program in programs(*PAGES)
    if not program.refusal and not program.needs
}
