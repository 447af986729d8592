"""Pages are shared and continued by exact prefixes only, and spans stay exact."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headway.kernels.numerics import PAGE
from headway.rollout_agent.engine.pages import Lease, PagePool, clip_spans, write_span

WRITES = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20), st.sampled_from("abc")), max_size=8)


@given(WRITES, st.integers(0, 40), st.integers(0, 40))
def test_spans_say_for_each_row_who_wrote_it_last(writes: list[tuple[int, int, str]], low: int, high: int) -> None:
    truth: list[str | None] = [None] * 40
    spans: list[tuple[int, int, str]] = []
    for start, size, version in writes:
        truth[start : start + size] = [version] * size
        spans = write_span(spans, start, start + size, version)
    said: list[str | None] = [None] * 40
    for start, end, version in spans:
        assert said[start:end] == [None] * (end - start), "spans overlap"
        said[start:end] = [version] * (end - start)
    assert said == truth
    assert all(a < b for a, b, _ in spans)
    assert all(x[1] < y[0] or x[2] != y[2] for x, y in itertools.pairwise(spans)), "neighbours not merged"
    clipped = [v for a, b, v in clip_spans(spans, low, high) for _ in range(a, b)]
    assert clipped == [v for v in truth[low:high] if v is not None]


FIRST, SECOND, THIRD = (list(range(n, n + PAGE)) for n in (100, 200, 300))


def pool(pages: int = 8) -> PagePool:
    return PagePool(pages, layers=1, top_k=1)


def take(held: PagePool, tokens: list[int], generation: int = 0, salt: str = "", room: int = 0) -> Lease:
    lease = held.acquire(tokens, room or len(tokens), generation, salt, "0.0")
    assert lease is not None
    return lease


def leave(held: PagePool, tokens: list[int], generation: int = 0, salt: str = "") -> Lease:
    """A request for `tokens` that was computed but for its last token, and ended."""
    lease = take(held, tokens, generation, salt)
    held.advance(lease, len(tokens) - 1 - lease.filled, "0.0")
    held.release(lease)
    return lease


def reused(held: PagePool, tokens: list[int], generation: int = 0, salt: str = "") -> int:
    lease = take(held, tokens, generation, salt)
    held.release(lease)
    return lease.filled


def test_only_exact_prefixes_under_the_same_weights_and_salt_are_read() -> None:
    held = [*FIRST, *SECOND, 1, 2, 3]
    for tokens, generation, salt, expected in (
        ([*held, 4], 0, "", 34),
        ([*FIRST, *SECOND, 1, 2, 9], 0, "", 34),  # the last token was never computed
        ([*FIRST, *SECOND, 1, 9, 3], 0, "", 32),
        ([*FIRST, *THIRD, 1, 2, 3], 0, "", 16),
        ([*SECOND, *FIRST, 1, 2, 3], 0, "", 0),
        ([*FIRST, *SECOND], 0, "", 16),  # something must be left to compute
        ([9, *held[1:]], 0, "", 0),
        ([*held, 4], 1, "", 0),
        ([*held, 4], 0, "x", 0),
    ):
        pages = pool()
        leave(pages, held)
        assert reused(pages, tokens, generation, salt) == expected, (tokens, generation, salt)


def test_full_pages_are_shared_while_in_use_and_others_never() -> None:
    pages = pool()
    a = take(pages, [*FIRST, 1, 2], room=40)
    pages.advance(a, 18, "0.0")
    b, c = (take(pages, [*FIRST, 1, 2, n], room=40) for n in (3, 4))
    assert (b.filled, c.filled) == (PAGE, PAGE)
    assert a.pages[0] == b.pages[0] == c.pages[0]
    assert len({*a.pages[1:], *b.pages[1:], *c.pages[1:]}) == 6
    assert pages.busy == 7


def test_a_page_that_is_not_full_is_continued_by_one_request_only() -> None:
    pages = pool()
    left = leave(pages, [*FIRST, 1, 2, 3])
    first = take(pages, [*FIRST, 1, 2, 7])
    assert (first.filled, first.pages[1]) == (18, left.pages[1])
    second = take(pages, [*FIRST, 1, 2, 8])
    assert (second.filled, second.pages[0]) == (PAGE, left.pages[0])
    assert second.pages[1] != left.pages[1]


def test_pages_idle_for_longest_are_evicted_and_the_last_of_a_sequence_before_its_first() -> None:
    pages = pool(6)
    leave(pages, [*FIRST, *SECOND, 1, 2])
    leave(pages, [*SECOND, *FIRST, 1, 2])
    take(pages, [*THIRD, 5], room=2 * PAGE)
    assert reused(pages, [*SECOND, *FIRST, 1, 2]) == 2 * PAGE + 1
    assert reused(pages, [*FIRST, *SECOND, 1, 2]) == PAGE


def test_a_sequence_gets_all_its_pages_or_waits() -> None:
    pages = pool(4)
    lease = take(pages, [*FIRST, 1, 2], room=3 * PAGE)
    pages.advance(lease, 17, "0.0")
    assert pages.acquire([*SECOND, 1], 2 * PAGE, 0, "", "0.0") is None
    assert pages.acquire([*FIRST, 7], 2 * PAGE, 0, "", "0.0") is not None, "it shares one and needs one"
    assert pages.busy == 4
    pages.release(lease)
    assert pages.busy == 2


def test_a_flush_forgets_what_is_idle_only() -> None:
    pages = pool()
    leave(pages, [*SECOND, 1])
    lease = take(pages, [*FIRST, 1])
    pages.advance(lease, 16, "0.0")
    pages.flush()
    assert reused(pages, [*SECOND, 1]) == 0
    assert reused(pages, [*FIRST, 2]) == PAGE


def test_what_is_discarded_is_not_read_again_unless_others_hold_it() -> None:
    pages = pool()
    a = take(pages, [*FIRST, *SECOND, 1])
    pages.advance(a, 32, "0.0")
    b = take(pages, [*FIRST, *THIRD, 1])
    assert set(pages.discard(a)) == {*a.pages[1:]}
    pages.release(a)
    assert reused(pages, [*FIRST, *SECOND, 1]) == PAGE
    assert set(pages.discard(b)) == {*b.pages}
    pages.release(b)
    assert reused(pages, [*FIRST, *SECOND, 1]) == 0


def test_rows_that_were_never_routed_are_marked_and_shared_rows_keep_their_routes() -> None:
    pages = pool()
    pages.routes[:] = 7  # left behind by somebody else
    a = take(pages, [*FIRST, 1, 2])
    pages.routes[a.rows(0, 17)] = np.arange(17)[:, None, None]
    pages.advance(a, 17, "0.0")
    rows, spans = pages.routed(a, 15, 19)
    assert rows.ravel().tolist() == [15, 16, -1, -1]
    assert spans == [(15, 17, "0.0")]
    b = pages.acquire([*FIRST, 3], 30, 0, "", "0.0")
    assert b is not None
    rows, spans = pages.routed(b, 14, 17)
    assert rows.ravel().tolist() == [14, 15, -1]
    assert spans == [(14, 16, "0.0")]
    assert pages.routed(None, 0, 2)[0].ravel().tolist() == [-1, -1]
