"""A clumsy programmer whose sessions start a model off: it knows the tools and is mostly wrong.

It reads, writes, sometimes tests, sometimes rewrites after a failure, and submits; about 28% of its sessions
end right. Rates are those of a recipe that was tried: more testing than `TEST` lets even a control run with
shuffled advantages improve. Observations are computed from the forms and equal what a real sandbox answers.
"""

from __future__ import annotations

from random import Random

from headway.sandbox.tasks.expr import Expression, ExprTask
from headway.schemas.expr_protocol import (
    PROMPT,
    VISIBLE_INPUTS,
    observation,
    render_file,
    render_test,
)

TEST, REWRITE_AFTER_FAILURE, RETEST, REWRITE_RIGHT = 0.25, 0.9, 0.3, 0.40
FIRST_RIGHT = {True: 0.55, False: 0.12}
FIRST_MISTAKEN = {True: 0.30, False: 0.73}
"""By whether the form is easy; the rest is a wrong constant."""

Segment = tuple[str, bool]


class Session:
    """Grows a session: (text, whether the model is trained on it)."""

    def __init__(self, gold: Expression, task: ExprTask) -> None:
        self.gold, self.task, self.written = gold, task, gold
        self.segments: list[Segment] = [(PROMPT.decode(), False)]

    def act(self, line: str, answer: str | None) -> None:
        self.segments.append((line + "\n", True))
        if answer is not None:
            self.segments.append((observation(answer).decode(), False))

    def read(self) -> None:
        self.act("r", render_file(self.task.text.encode()))

    def write(self, expression: Expression) -> None:
        self.written = expression
        self.act(f"w {expression.text}", "ok")

    def test(self) -> bool:
        got, want = self.written.values(VISIBLE_INPUTS), self.gold.values(VISIBLE_INPUTS)
        answer = render_test((x, str(y), z) for x, y, z in zip(VISIBLE_INPUTS, got, want, strict=True))
        self.act("t", answer)
        return answer == "pass"

    def submit(self) -> None:
        self.act("s", None)


def demonstrate(gold: Expression, task: ExprTask, rng: Random) -> Session:
    """One session, always submitted; `written` is what it ended with."""
    session = Session(gold, task)
    session.read()
    session.write(_first_try(gold, task, rng))
    if rng.random() < TEST and not session.test() and rng.random() < REWRITE_AFTER_FAILURE:
        session.write(gold if rng.random() < REWRITE_RIGHT else _wrong(gold, rng))
        if rng.random() < RETEST:
            session.test()
    session.submit()
    return session


def _first_try(gold: Expression, task: ExprTask, rng: Random) -> Expression:
    """What it writes before any test; a constant that the docstring hides can only be guessed."""
    known = gold.misremembered(rng, task.hides) if task.hides else gold
    draw, easy = rng.random(), gold.form.easy
    if draw < FIRST_RIGHT[easy]:
        return known
    if draw < FIRST_RIGHT[easy] + FIRST_MISTAKEN[easy]:
        return known.mistaken()
    return known.misremembered(rng)


def _wrong(gold: Expression, rng: Random) -> Expression:
    return gold.mistaken() if rng.random() < 0.5 else gold.misremembered(rng)
