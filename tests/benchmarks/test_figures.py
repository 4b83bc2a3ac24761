"""The figures of the README and the manual: one file for light and dark pages, and text is text."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from benchmarks.figures.scalable import for_both_schemes

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
FIGURES = sorted((ROOT / "benchmarks/results/figures").glob("*.json"))
SVG = "{http://www.w3.org/2000/svg}"
RULE = re.compile(r"\.(\w+) \{ (.*) \}")


def picture(name: str) -> str:
    return (ROOT / f"docs/figures/{name}.svg").read_text()


@pytest.fixture(params=[path.stem for path in FIGURES])
def figure(request: pytest.FixtureRequest) -> str:
    return picture(request.param)


def test_its_words_can_be_searched(figure: str) -> None:
    """Titles, labels and legends are text, and glyphs are not drawn as paths."""
    tree = ElementTree.fromstring(figure)
    words = " ".join(text for node in tree.iter(f"{SVG}text") for text in node.itertext())
    assert tree.findtext(f"{SVG}title", "none") in words
    assert "python -m benchmarks.figures" in words


def test_every_colour_changes_with_the_scheme(figure: str) -> None:
    """A class with a colour has another on dark pages; no colour stands outside of a class."""
    light, _, dark = figure.partition("prefers-color-scheme: dark")
    colored = {name for name, style in RULE.findall(light) if "#" in style}
    assert colored
    assert colored == {name for name, _ in RULE.findall(dark)}
    body = figure.partition("</style>")[2]
    assert not re.search(r'"[^"]*#[0-9a-f]{6}', body)


def test_coordinates_have_one_decimal(figure: str) -> None:
    """In all attributes; labels may have more."""
    assert not re.search(r'"[^"<]*\d\.\d\d[^">]*"', figure.partition("</style>")[2])


def test_what_is_drawn_becomes_one_file() -> None:
    """Styles become classes, and what nobody refers to goes."""
    drawn = """<svg xmlns="http://www.w3.org/2000/svg" width="10pt" height="5pt" viewBox="0 0 10 5">
    <metadata>by a program</metadata>
    <g id="figure_1"><path d="M 1.26 0.04&#10;L -0.01 2" style="stroke: #ff0000; fill: none"/>
    <text style="font-size: 9px; font-family: 'DejaVu Sans'; fill: #000000">a &lt; b</text></g>
    </svg>"""
    made = for_both_schemes(drawn, "A & B", {"#FF0000": "#00FF00", "#000000": "#FFFFFF"})
    assert "<title>A &amp; B</title>" in made
    assert '<path d="M 1.3 0 L 0 2" class="s0"/>' in made
    assert '<text class="s1">a &lt; b</text>' in made
    assert ".s0 { stroke: #ff0000; fill: none }" in made
    assert ".s1 { font-size: 9px; fill: #000000 }" in made
    assert ".s0 { stroke: #00ff00 }\n   .s1 { fill: #ffffff }" in made
    assert "program" not in made
