"""Type checkers' knowledge of a group's calls. mypy and pyright read this file; nobody runs it."""

from __future__ import annotations

from typing import Any, assert_type

from memlane import Call, WorkerGroup, Workers


class Model:
    """A worker."""

    def __init__(self, rank: int, world: int, size: int = 1) -> None:
        self.rank = rank

    def step(self, batch: list[int], *, scale: float = 1.0) -> dict[str, float]:
        """A method with arguments."""
        return {"sum": scale * sum(batch)}


def tokens(model: Model, count: int) -> str:
    """A function whose first argument is the worker."""
    return str(model.rank) * count


def calls(group: WorkerGroup[Model]) -> None:
    """The arguments are the method's, and so is the result, by rank."""
    assert_type(group.call(Model.step, [1], scale=2.0), list[dict[str, float]])
    assert_type(group[1].call(tokens, 3), list[str])
    assert_type(group.submit(Model.step, [1]), Call[dict[str, float]])
    assert_type(group.submit(tokens, 1).result(), list[str])
    assert_type(group.submit(tokens, 1).outcomes(), list[str | BaseException])
    assert_type(group.call("step", 1, 2), list[Any])
    assert_type(group[1:].within(5), Workers[Model])
    group.call(Model.step, "text")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]


def opens() -> None:
    """The factory tells of which class the workers are."""
    with WorkerGroup(Model, 2, args=[1]) as group:
        assert_type(group, WorkerGroup[Model])
