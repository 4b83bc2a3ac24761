"""A region that does not fit is refused while another process creates it."""

import os

import pytest

from memlane._base import segments as space
from tests.support import start
from tests.support.regions import PAGE, file_of, half_created, new_id, path_of, region_of


def test_who_takes_over_needs_only_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Space that the dead creator reserved is not needed again."""
    monkeypatch.setattr(space, "memory_room", lambda *_: 3 * PAGE)
    instance = new_id()
    creator = start(half_created, instance)
    creator.hear()
    waiting = file_of(instance)
    assert waiting.enter(1) == "joined"
    with path_of(instance).open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, 5 * PAGE)
    creator.kill()
    region_of(instance, 1).cleanup()
    waiting.leave(1)
