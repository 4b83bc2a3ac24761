"""Every sync point has the same name in the code, in its table, and in the models."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = "".join(p.read_text() for p in (ROOT / "native").rglob("*.hpp"))
MODELS = "".join(p.read_text() for p in (ROOT / "verification").glob("*.pml"))


def in_code(side: str) -> set[str]:
    """Names marked in the native code."""
    return set(re.findall(rf"SYNC_{side.upper()}\((\w+)\);", CODE))


def in_models(side: str) -> set[str]:
    """Names marked in the models."""
    return set(re.findall(rf"/\* SYNC (\w+)\.{side} \*/", MODELS))


def in_table(first_column: str) -> set[str]:
    """Names explained in a table of sync.hpp: of pairs (`name`) or of single steps (`step`)."""
    header = (ROOT / "native/core/sync.hpp").read_text()
    table = header[header.index(f"//   {first_column} ") :].split("//\n")[0]
    return set(re.findall(r"^//   (\w+) ", table, re.MULTILINE)) - {first_column}


def test_code_marks_both_ends() -> None:
    """Every point has a store side, a load side and a line in the table."""
    assert in_code("store") == in_code("load") == in_table("name")


def test_steps_are_in_their_table() -> None:
    """Steps that leave something behind are marked once, and are in their own table."""
    assert in_code("step") == in_table("step")


def test_models_mark_both_ends() -> None:
    """Every point of the code is in a model, with both sides; no model has others."""
    assert in_models("store") == in_models("load") == in_table("name")


def test_marks_in_models_have_one_form() -> None:
    """Every mark is seen by the two tests above."""
    assert len(re.findall(r"SYNC", MODELS)) == len(
        re.findall(r"/\* SYNC \w+\.(?:store|load) \*/", MODELS)
    )
