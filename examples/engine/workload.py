"""The engine's work: all prompts of a text file at once, or the requests of a trace over time."""

from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path

from .batching import Request
from .images import PLACEHOLDERS, draw_images
from .trace import Scale, TraceLine, requests_of

SYSTEM = "Continue the text as its author would have done: "


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrivals, and their description for the user."""

    requests: list[Request]
    title: str
    scaled: str | None = None
    """For a trace: how the replay differs from the recording."""
    images: str | None = None
    """If there are any: their number and size, and how many requests have one."""


def with_images(workload: Workload, count: int) -> Workload:
    """Return the workload with `count` images in front of its prompts.

    The requests get the images in turn, then one gets none, then the first image comes again.
    """
    images = list(islice(draw_images(), min(count, len(workload.requests))))
    if not images:
        return workload
    requests = [
        replace(request, prompt=PLACEHOLDERS + request.prompt, image=image) if image else request
        for request, image in zip(workload.requests, cycle([*images, None]), strict=False)
    ]
    having = sum(request.image is not None for request in requests)
    size = sum(image.pixels.nbytes for image in images) / 1e6
    text = f"{len(images)}, {size:.1f} MB in all, come with {having} of the requests"
    return replace(workload, requests=requests, images=text)


def prompts_workload(prompts: list[bytes], tokens: int, system: bytes = b"") -> Workload:
    """All prompts at the start, behind the `system` prompt; each gets up to `tokens` tokens."""
    return Workload(
        requests=[Request(system + prompt, tokens) for prompt in prompts],
        title=f"{len(prompts)} prompts, up to {tokens} tokens each",
    )


def trace_workload(path: Path, trace: list[TraceLine], limit: int, scale: Scale) -> Workload:
    """The first `limit` requests of a trace, at their arrival times (scaled by `scale.time`)."""
    requests = requests_of(trace[:limit], scale)
    prompts = [len(request.prompt) for request in requests]
    answers = [request.new_tokens for request in requests]
    return Workload(
        requests=requests,
        title=f"{len(requests)} of {len(trace)} requests of {path.name}",
        scaled=(
            f"time x {scale.time:g}: they arrive within {requests[-1].arrival:.1f} s; "
            f"lengths / {scale.tokens}, rounded up: prompts of {min(prompts)} to {max(prompts)} "
            f"tokens, answers of {min(answers)} to {max(answers)}; contents made from the hash_ids"
        ),
    )
