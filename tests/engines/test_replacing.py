"""Names are replaced in all modules, or in none."""

import sys
from types import ModuleType

import pytest

from memlane.engines._replacing import Replacement, replace


class Frozen(ModuleType):
    """A module that refuses to be changed."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "Queue":
            raise TypeError("frozen")
        super().__setattr__(name, value)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module with a class, and one that has copied it under another name."""
    home, importer = ModuleType("an_engine"), ModuleType("an_importer")
    vars(home).update(Queue=type("Queue", (), {"stop": lambda self: "old"}), Other=object)
    vars(importer).update(Copy=vars(home)["Queue"], Other=dict)
    monkeypatch.setitem(sys.modules, "an_engine", home)
    monkeypatch.setitem(sys.modules, "an_importer", importer)
    return home


def test_copies_are_replaced_under_any_name(engine: ModuleType) -> None:
    """And nothing else; methods of a class are replaced in the class."""
    old = [engine.Queue]
    lines = replace(
        [
            Replacement("an_engine", "Queue.stop", lambda self: "new"),
            Replacement("an_engine", "Queue", str),
        ]
    )
    assert lines == [
        "an_engine.Queue.stop is memlane's",
        "an_engine.Queue is memlane's, also in an_importer",
    ]
    assert engine.Queue is sys.modules["an_importer"].Copy is str
    assert old[0]().stop() == "new"
    assert sys.modules["an_importer"].Other is dict


def test_classes_are_replaced_all_or_none(
    engine: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one cannot be replaced, everything is as it was."""
    old, stop = [engine.Queue], engine.Queue.stop
    stubborn = Frozen("stubborn")
    vars(stubborn)["Queue"] = engine.Queue
    monkeypatch.setitem(sys.modules, "stubborn", stubborn)
    with pytest.raises(TypeError, match="frozen"):
        replace(
            [
                Replacement("an_engine", "Queue.stop", None),
                Replacement("an_engine", "Queue", str),
            ]
        )
    assert engine.Queue is sys.modules["an_importer"].Copy is old[0]
    assert engine.Queue.stop is stop
    monkeypatch.delitem(sys.modules, "stubborn")
    with pytest.raises(AttributeError, match="Gone"):
        replace([Replacement("an_engine", "Queue", str), Replacement("an_engine", "Gone", str)])
    assert engine.Queue is old[0]
