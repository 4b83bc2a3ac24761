"""Collects the texts of memlane's errors and log lines from its source, as templates.

A template is the text with a placeholder in braces for each expression, as the source has it:
`reader {rank} (pid {pid}) died{detail}`. Whatever looks like a sentence counts, wherever it stands,
so that a new text cannot be missed; what no user ever sees is named below.

The manual's page of every text is made of them (docs/conf.py).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LOGS = {"debug", "info", "warning", "error", "exception", "warn", "add_note"}

METRICS = ("_COUNTERS", "_GAUGES")  # tables of metrics and their documentation

# Sentences that are neither errors nor log lines.
SILENT = {
    "The given buffer is not writable",  # a filter for one of torch's warnings
    "can't start new thread",  # Python's own text, looked for
    "header must be that of a message",  # for callers within memlane
    "type must be a tuple",  # the same
    "it was closed",  # for a caller within memlane, which handles it
    "Callable[[Any, int], int]",  # a type
    "list[int | bytes]",  # the same
    r"non-2xx status code: (\d{3})",  # looked for in obstore's texts
    "an object tier",  # a part of texts, as for all tiers
    "module {__name__!r} has no attribute {name!r}",  # as of any module
    "lazily computed",  # within another text, which is listed whole
    "and no",  # the same
    "/dev/shm/{file_name('engine_id', engine_id, 'vllm_offload_')}",  # a path
    "%lx-%lx %4s",  # a format of /proc/self/maps
}


LOG, PART = "Log lines", "Parts of other texts"


class Origin(NamedTuple):
    """The place of a text, and the error that it belongs to, `LOG` or `PART`."""

    place: str
    kind: str


def texts() -> dict[str, Origin]:
    """Each template, without surrounding spaces, with its origin."""
    found: dict[str, Origin] = {}
    for path in sorted(ROOT.glob("src/memlane/**/*.py")):
        own = ("replay.py", "conformance.py", "catalogue.py", "exposition.py", "tier_counters.py")
        if "cli" in path.relative_to(ROOT).parts or path.name in own:
            continue  # what commands show, and complain of in their own words; a suite of tests;
            # what metrics mean, which docs/reference/metrics.md says
        for line, text, kind in _python(path.read_text(), path.name == "errors.py"):
            found.setdefault(text, Origin(f"{path.relative_to(ROOT)}:{line}", kind))
    for pattern in ("**/*.hpp", "**/*.cpp"):
        for path in sorted((ROOT / "native").glob(pattern)):
            if "tests" not in path.relative_to(ROOT).parts:
                for line, text in _native(path.read_text()):
                    found.setdefault(text, Origin(f"{path.relative_to(ROOT)}:{line}", PART))
    for silent in SILENT:
        del found[silent]
    return found


def page() -> str:
    """The manual's page of every text: a heading and a block for each error, then the others."""
    groups: dict[str, list[str]] = {}
    for text, origin in texts().items():
        groups.setdefault(origin.kind, []).append(text)
    ends = (LOG, PART)
    order = [*sorted(groups.keys() - {*ends}), *(kind for kind in ends if kind in groups)]
    blocks = ["\n".join(groups[kind]) for kind in order]
    return "".join(
        f"\n## {kind}\n\n```text\n{block}\n```\n" for kind, block in zip(order, blocks, strict=True)
    )


def pattern(template: str) -> re.Pattern[str]:
    """Returns what a template looks like with anything in its places."""
    parts = re.split(r"\{(?:[^{}]|\{[^{}]*\})*\}|%[.\d]*[dsrfx]", template)
    return re.compile(".*?".join(map(re.escape, parts)))


def _words(template: str) -> int:
    """Returns how many words a template has beside its placeholders."""
    return len(re.findall(r"[A-Za-z]{2,}", re.sub(r"\{[^{}]*\}|%[.\d]*[dsrf]", " ", template)))


def _is_text(template: str, least: int) -> bool:
    text = template.strip()
    return " " in text and not text.startswith("<") and _words(text) >= least


# Python ---------------------------------------------------------------------------------------


def _python(source: str, defines_errors: bool) -> Iterator[tuple[int, str, str]]:
    tree = ast.parse(source)
    shown: dict[ast.AST, str] = {}  # nodes within what is raised or logged, and as what
    errors: set[ast.AST] = set()  # what an error passes to its base: its whole text
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and defines_errors:
            shown.update(dict.fromkeys(ast.walk(node), node.name))
        if isinstance(node, ast.Raise):
            shown.update(dict.fromkeys(ast.walk(node), _error_of(node)))
        elif isinstance(node, ast.Call) and _is_log(node):
            shown.update(dict.fromkeys(ast.walk(node), LOG))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "super().__init__":
            errors.update(node.args if defines_errors else ())
        elif isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            if ast.get_docstring(node, clean=False) is not None:
                skipped.add(node.body[0].value)  # type: ignore[attr-defined]
            if getattr(node, "name", "") == "__repr__":
                skipped.update(ast.walk(node))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(node.value)  # a docstring of an attribute
        elif isinstance(node, ast.keyword) and node.arg == "documentation":
            skipped.update(ast.walk(node))  # of a metric
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in METRICS:
            skipped.update(ast.walk(node))
    for node in ast.walk(tree):
        if isinstance(node, (ast.JoinedStr, ast.FormattedValue)):
            parts = [part for part in ast.iter_child_nodes(node) if part is not node]
            skipped.update(part for part in parts if isinstance(part, ast.Constant))
            if isinstance(node, ast.FormattedValue) and node.format_spec is not None:
                skipped.add(node.format_spec)
                skipped.update(ast.walk(node.format_spec))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.JoinedStr):
            text = _template(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        least = 1 if node in shown else 2 if isinstance(node, ast.JoinedStr) else 3
        if node in errors or _is_text(text, least):
            yield node.lineno, text.strip(), shown.get(node, PART)


def _error_of(statement: ast.Raise) -> str:
    """The class that is raised, if it is named there."""
    raised = statement.exc.func if isinstance(statement.exc, ast.Call) else statement.exc
    name = getattr(raised, "attr", getattr(raised, "id", ""))
    return name if name[:1].isupper() else PART


def _is_log(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name in LOGS


def _template(text: ast.JoinedStr) -> str:
    parts = []
    for part in text.values:
        if isinstance(part, ast.Constant):
            parts.append(part.value)
            continue
        assert isinstance(part, ast.FormattedValue)
        conversion = "" if part.conversion < 0 else f"!{chr(part.conversion)}"
        form = part.format_spec
        spec = f":{_template(form)}" if isinstance(form, ast.JoinedStr) else ""
        parts.append(f"{{{ast.unparse(part.value)}{conversion}{spec}}}")
    return "".join(str(part) for part in parts)


# C++ ------------------------------------------------------------------------------------------

_TOKEN = re.compile(
    r"""//[^\n]*|/\*.*?\*/|\#[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])'|\w+|::|->|\s+|.""",
    re.DOTALL,
)
_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"')
_INNER = "\0"  # begins what was in parentheses: it belongs to the expression before it
# What a documentation string of a binding, or another text that no user reads, is passed to.
_UNSEEN = re.compile(r"\b(?:def\w*|class_|sig|static_assert|doc|SYNC_\w+|__asm__|asm)\b")
_ENDS = {",", "?", ":", "=", "return", "throw", "<", ">", "&", "|"}


def _native(source: str) -> Iterator[tuple[int, str]]:
    line = 1
    statement: list[tuple[int, str]] = []
    for match in _TOKEN.finditer(source):
        token = match.group()
        if not token.startswith(("//", "/*", "#")):
            if token in (";", "{", "}"):
                yield from _in_statement(statement)
                statement = []
            else:
                statement.append((line, " " if token.isspace() else token))
        line += token.count("\n")


def _in_statement(tokens: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """The texts among the tokens of a statement: sums of literals and other expressions."""
    first = next((token for _, token in tokens if token != " "), "")
    if first == "," or _UNSEEN.search(" ".join(token for _, token in tokens)):
        return  # what follows a lambda is the rest of a binding
    stack: list[list[tuple[int, str]]] = [[]]
    for line, token in tokens:
        if token in ("(", "["):
            stack[-1].append((line, token))
            stack.append([])
        elif token in (")", "]") and len(stack) > 1:
            inner = stack.pop()
            yield from _of_sum(inner)
            stack[-1].append((line, _INNER + "".join(part for _, part in inner) + token))
        elif token in _ENDS:
            yield from _of_sum(stack[-1])
            stack[-1] = [*stack[-1], (line, token)] if len(stack) > 1 else []
            stack[-1] = _Rest(stack[-1])
        else:
            stack[-1].append((line, token))
    for rest in stack:
        yield from _of_sum(rest)


class _Rest(list[tuple[int, str]]):
    """Tokens of an expression of which all so far belong to finished sums."""

    def __init__(self, tokens: list[tuple[int, str]]) -> None:
        super().__init__(tokens)
        self.done = len(tokens)


def _of_sum(tokens: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    own = tokens[tokens.done :] if isinstance(tokens, _Rest) else tokens
    line, text, other = 0, "", ""
    for at, token in own:
        if _LITERAL.fullmatch(token):
            text += _placeholder(other)
            other = ""
            line = line or at
            text += ast.literal_eval(token)
        elif token == "+":
            text += _placeholder(other)
            other = ""
        else:
            other += token.replace(_INNER, "")
    if not line:
        return
    text += _placeholder(other)
    if _is_text(text, 2):
        yield line, text.strip()


_CONVERSION = re.compile(r"(?:std::to_string|static_cast<[^<>]*>|unsigned)[({](.*)[)}]", re.DOTALL)


def _placeholder(code: str) -> str:
    code = code.strip()
    while found := _CONVERSION.fullmatch(code):
        code = found.group(1)
    return f"{{{code}}}" if code else ""
