"""The `expr` task set: 684 one-line programs, distinct by behaviour, each with bugs to repair.

A program is a form (one of twelve) with constants. Its file carries a docstring that says what the form does,
sometimes with one constant hidden as `?` where f(0) reveals it, and a buggy return line: half the time the
form's systematic mistake, half the time one wrong constant. Train and held-out are split by program. Values
are computed by our own functions below; no text is ever evaluated here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from headway.schemas.errors import InputError
from headway.schemas.expr_protocol import HIDDEN_INPUTS, VISIBLE_INPUTS, program_text

HELDOUT_FRACTION = 0.2
TRAIN_VARIANTS = 4
"""Bugs for each train program; a held-out program has one."""
TASK_SET_BYTES_MAX = 64 << 20


@dataclass(frozen=True, slots=True)
class Form:
    """A family of expressions in x and the constants A and B (`two` says whether B occurs)."""

    text: str
    doc: str
    value: Callable[[int, int, int], int]
    mistake: str = ""
    reveals: str = ""
    easy: bool = False

    @property
    def two(self) -> bool:
        return "B" in self.text


FORMS: dict[str, Form] = {
    form.text: form
    for form in (
        Form("x*A+B", "x times A, plus B", lambda x, a, b: x * a + b, "x*A-B", "B", True),
        Form("x*A-B", "x times A, minus B", lambda x, a, b: x * a - b, "x*A+B", "B", True),
        Form("(x+A)*B", "x plus A, all times B", lambda x, a, b: (x + a) * b, "x+A*B"),
        Form("(x-A)*B", "x minus A, all times B", lambda x, a, b: (x - a) * b, "x-A*B"),
        Form("A-x*B", "A minus x times B", lambda x, a, b: a - x * b, "(A-x)*B", "A"),
        Form("x*x+A", "x squared, plus A", lambda x, a, b: x * x + a, "x*2+A", "A", True),
        Form("max(x,A)", "the larger of x and A", lambda x, a, b: max(x, a), "min(x,A)"),
        Form("min(x,A)", "the smaller of x and A", lambda x, a, b: min(x, a), "max(x,A)"),
        Form("x%A+B", "x modulo A, plus B", lambda x, a, b: x % a + b, "x//A+B", "B"),
        Form("x//A+B", "x divided by A, plus B", lambda x, a, b: x // a + b, "x%A+B", "B"),
        Form("A-x", "A minus x", lambda x, a, b: a - x, "x-A", "A", True),
        Form("abs(x-A)", "distance of x from A", lambda x, a, b: abs(x - a), "x-A", "", True),
    )
}
MISTAKEN_FORMS: dict[str, Form] = {
    form.text: form
    for form in (
        Form("x+A*B", "", lambda x, a, b: x + a * b),
        Form("x-A*B", "", lambda x, a, b: x - a * b),
        Form("(A-x)*B", "", lambda x, a, b: (a - x) * b),
        Form("x*2+A", "", lambda x, a, b: x * 2 + a),
        Form("x-A", "", lambda x, a, b: x - a),
    )
}


@dataclass(frozen=True, slots=True)
class Expression:
    """A form with constants."""

    form: Form
    a: int
    b: int

    @property
    def text(self) -> str:
        return _fill(self.form.text, str(self.a), str(self.b))

    def values(self, inputs: tuple[int, ...]) -> list[int]:
        return [self.form.value(x, self.a, self.b) for x in inputs]

    def docstring(self, hidden: str = "") -> str:
        return _fill(self.form.doc, "?" if hidden == "A" else str(self.a), "?" if hidden == "B" else str(self.b))

    def mistaken(self) -> Expression:
        """The systematic mistake: the same constants in a form that is often confused with this one."""
        name = self.form.mistake
        return Expression(FORMS.get(name) or MISTAKEN_FORMS[name], self.a, self.b)

    def misremembered(self, rng: Random, constant: str = "") -> Expression:
        """The same form with one constant (`constant`, or any) drawn anew and different."""
        constant = constant or (rng.choice("AB") if self.form.two else "A")
        old = self.a if constant == "A" else self.b
        new = rng.choice([value for value in _range(self.form, constant) if value != old])
        return Expression(self.form, new if constant == "A" else self.a, new if constant == "B" else self.b)


def _fill(template: str, a: str, b: str) -> str:
    return template.replace("A", a).replace("B", b)


def _range(form: Form, constant: str) -> range:
    if not form.two:
        return range(2, 42) if constant == "A" else range(1)
    return range(2, 10) if constant == "A" else range(1, 10)


def programs() -> list[Expression]:
    """Every expression of the twelve forms, one for each behaviour on the hidden inputs."""
    found: dict[tuple[int, ...], Expression] = {}
    for form in FORMS.values():
        for a in _range(form, "A"):
            for b in _range(form, "B"):
                expression = Expression(form, a, b)
                found.setdefault(tuple(expression.values(HIDDEN_INPUTS)), expression)
    return list(found.values())


def split(seed: int) -> tuple[list[Expression], list[Expression]]:
    """Train and held-out programs, disjoint by behaviour."""
    everything = programs()
    Random(f"expr-split-{seed}").shuffle(everything)
    heldout = int(len(everything) * HELDOUT_FRACTION)
    return everything[heldout:], everything[:heldout]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExprTask:
    """One program with one bug: what a session starts from, and what its end is compared with."""

    id: str
    split: str
    template: str
    gold: str
    hides: str
    """The constant that the docstring hides, or empty."""
    text: str
    visible: list[list[int]]
    inputs: list[int]
    expected: list[int]


def bug_of(gold: Expression, hides: str, rng: Random) -> Expression:
    """A wrong version: the systematic mistake or, half the time, one wrong constant.

    The constant that the docstring hides is always wrong in the file too, so only a test reveals it.
    """
    while True:
        base = gold.misremembered(rng, hides) if hides else gold
        other = base if hides else gold.misremembered(rng)
        wrong = base.mistaken() if rng.random() < 0.5 else other
        if wrong.values(HIDDEN_INPUTS) != gold.values(HIDDEN_INPUTS):
            return wrong


def make_task(gold: Expression, task_id: str, part: str, hides: str, rng: Random) -> ExprTask:
    return ExprTask(
        id=task_id,
        split=part,
        template=gold.form.text,
        gold=gold.text,
        hides=hides,
        text=program_text(gold.docstring(hides), bug_of(gold, hides, rng).text),
        visible=[[x, y] for x, y in zip(VISIBLE_INPUTS, gold.values(VISIBLE_INPUTS), strict=True)],
        inputs=list(HIDDEN_INPUTS),
        expected=gold.values(HIDDEN_INPUTS),
    )


def tasks(seed: int) -> Iterator[tuple[Expression, ExprTask]]:
    """Every task of a seed with its program: train first, then held-out. Every other chance to hide is taken."""
    train, heldout = split(seed)
    for part, golds, variants in (("train", train, TRAIN_VARIANTS), ("heldout", heldout, 1)):
        revealing = 0
        for number, gold in enumerate(golds):
            revealing += bool(gold.form.reveals)
            for variant in range(variants):
                hides = gold.form.reveals if (revealing + variant) % 2 else ""
                task_id = f"{part}-{number:03d}-{variant}"
                yield gold, make_task(gold, task_id, part, hides, Random(f"expr-{seed}-{task_id}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSet:
    """Tasks by id, and the digest by which everyone names this set."""

    digest: str
    tasks: dict[str, ExprTask]


def load_task_set(folder: Path) -> TaskSet:
    """Read what `build` wrote. Raises InputError."""
    try:
        parts = [(folder / f"{part}.jsonl").read_bytes() for part in ("train", "heldout")]
        if sum(map(len, parts)) > TASK_SET_BYTES_MAX:
            raise ValueError(f"larger than {TASK_SET_BYTES_MAX} bytes")
        found = [ExprTask(**json.loads(line)) for part in parts for line in part.splitlines()]
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            f"no readable task set in {folder}", why=str(error)[:200], hint="build it: `headway tasks build`"
        ) from None
    return TaskSet(digest=digest_of_parts(parts), tasks={task.id: task for task in found})


def digest_of_parts(parts: list[bytes]) -> str:
    """SHA-256 over train.jsonl then heldout.jsonl."""
    return hashlib.sha256(b"".join(parts)).hexdigest()


def dump_lines(rows: list[ExprTask]) -> bytes:
    return b"".join(json.dumps(asdict(row), separators=(",", ":")).encode() + b"\n" for row in rows)
