import asyncio
import random

import pytest

from headway.schemas.errors import ConfigError, UnavailableError
from headway.weight_sync.transfer import Downloader, Retrier, TransferLimits, for_each


async def test_no_more_than_the_limit_runs_or_is_taken_at_a_time():
    running, most, taken, done = 0, 0, 0, []

    def items():
        nonlocal taken
        for i in range(20):
            taken += 1
            assert taken - len(done) <= 3
            yield i

    async def work(item):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        done.append(item)

    await for_each(items(), work, 3)
    assert sorted(done) == list(range(20))
    assert most == 3


async def test_the_first_failure_cancels_the_rest_and_is_raised_itself():
    cancelled, last_started = [], asyncio.Event()

    async def work(item):
        if item == 1:
            await last_started.wait()
            raise UnavailableError("one")
        try:
            if item == 2:
                last_started.set()
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.append(item)
            raise

    with pytest.raises(UnavailableError, match="one"):
        await for_each(range(3), work, 3)
    assert sorted(cancelled) == [0, 2]


async def test_waits_double_with_jitter_up_to_a_limit_and_then_the_last_error_is_raised():
    waits, tries = [], []

    async def sleep(wait_s):
        waits.append(wait_s)

    async def attempt():
        tries.append(None)
        raise UnavailableError(f"try {len(tries)}")

    limits = TransferLimits(attempts_max=6, wait_s=1.0, wait_s_max=4.0)
    with pytest.raises(UnavailableError, match="try 6"):
        await Retrier(limits=limits, rng=random.Random(0), sleep=sleep).run("x", attempt)
    assert all(top / 2 <= wait <= top for wait, top in zip(waits, [1, 2, 4, 4, 4], strict=True))
    assert len(set(waits)) == 5


async def test_errors_that_trying_again_cannot_mend_are_not_retried():
    async def attempt():
        tries.append(None)
        raise ConfigError("no")

    tries = []
    with pytest.raises(ConfigError):
        await Retrier(limits=TransferLimits(), rng=random.Random(0)).run("x", attempt)
    assert len(tries) == 1


@pytest.mark.parametrize(
    ("size", "near", "due"), [(5000, False, 32), (5000, True, 3), (40, False, 1), (100_000, False, 50)]
)
async def test_a_small_object_is_asked_for_in_as_many_ranges_as_may_be_in_flight(size, near, due):
    """From the origin, where every range is a connection's first round trips; not from a relay, which is near."""
    asked = []

    class Store:
        async def get_range(self, key, start, end, size_bytes=0):
            asked.append((start, end))
            return bytes(range(256))[start % 7 : start % 7 + 1] * (end - start)

    limits = TransferLimits(parallel=32, range_bytes=2000, range_bytes_min=100)
    retrier = Retrier(limits=limits, rng=random.Random(0))
    downloader = Downloader(origin=Store(), retrier=retrier, relay=Store() if near else None)
    data = await downloader.get("k", bytes, size_bytes=size)
    assert len(data) == size
    assert len(asked) == due
    assert [start for start, _ in sorted(asked)] == [0, *(end for _, end in sorted(asked))][:-1]
