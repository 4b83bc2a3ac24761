"""Workers compute the next step while the one before is handled."""

from collections.abc import Iterator

from memlane import WorkerGroup


def ranks(rank: int, world: int) -> int:
    return rank  # anything can be a worker, here a number


def generate(worker: int, prompt: str, most: int) -> Iterator[str]:
    for number in range(most):
        yield f"{prompt} {number} of {worker}"


if __name__ == "__main__":
    with WorkerGroup(ranks, 2) as group:
        for tokens in group.stream(generate, "token", most=3):
            print(tokens)  # ['token 0 of 0', 'token 0 of 1'], ...
