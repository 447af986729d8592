"""The relay on a loopback port, before an origin that counts, stalls and fails on request."""

import asyncio
import contextlib
import math
import os
import random
import subprocess

import aiohttp
import pytest
from aiohttp import web

from headway.bus.blobs import MissingBlob
from headway.schemas.errors import UnavailableError, WireError
from headway.schemas.wire import digest_of
from headway.weight_sync.relay import Relay
from headway.weight_sync.relay_client import RelayClient
from headway.weight_sync.shelf import Shelf
from headway.weight_sync.transfer import Downloader, Retrier, SourceDown, TransferLimits, checked

PREFIX, TOKEN = "demo/weights/", "secret"
LIMITS = TransferLimits(attempts_max=2, wait_s=0.001, range_bytes=1000, rest_s=60.0)


class Origin:
    """Objects by key; every read is counted, and waits while `gate` is closed."""

    def __init__(self, *objects):
        self.objects = {key_of(data): data for data in objects}
        self.reads, self.gate, self.down = [], asyncio.Event(), False
        self.failure = UnavailableError("the origin is down")
        self.gate.set()

    async def get(self, key):
        return await self.get_range(key, 0, None)

    async def get_range(self, key, start, end):
        self.reads.append((key, start, end))
        await self.gate.wait()
        if self.down:
            raise self.failure
        if key not in self.objects:
            raise MissingBlob(f"{key}: no such object")
        return self.objects[key][start:end]


def key_of(data, kind="shard"):
    return f"{PREFIX}{digest_of(data)}.{kind}"


def blob(seed, size=2500):
    return random.Random(seed).randbytes(size)


@contextlib.asynccontextmanager
async def relaying(folder, origin, bytes_max=1 << 20):
    """(relay, a client of it)."""
    relay = Relay(Shelf(folder, bytes_max), origin, PREFIX, TOKEN, LIMITS)
    runner = web.AppRunner(relay.app(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with aiohttp.ClientSession() as http:
            yield relay, RelayClient(http, url, TOKEN)
    finally:
        await runner.cleanup()
        await relay.close()


def downloader(origin, relay):
    return Downloader(origin=origin, relay=relay, retrier=Retrier(limits=LIMITS, rng=random.Random(0)))


async def fetch(origin, relay, data, key=None):
    key = key or key_of(data)
    return await downloader(origin, relay).get(
        key, lambda found: checked(key, found, digest_of(data)), size_bytes=len(data)
    )


async def status(relay, path, **headers):
    async with relay._http.get(f"{relay._url}/{path}", headers=headers) as reply:
        return reply.status, await reply.read()


async def test_many_askers_for_ranges_and_wholes_cost_one_origin_read(tmp_path):
    data = blob(1)
    origin = Origin(data)
    origin.gate.clear()
    async with relaying(tmp_path, origin) as (relay, client):
        asks = [client.get_range(key_of(data), start, start + 100, len(data)) for start in range(0, 2000, 100)]
        asking = asyncio.gather(*asks, *(client.get(key_of(data)) for _ in range(5)))
        await asyncio.sleep(0.05)
        origin.gate.set()
        parts = await asking
        assert b"".join(parts[:20]) == data[:2000]
        assert parts[20:] == [data] * 5
        assert sorted(start for _, start, _ in origin.reads) == [0, 1000, 2000]  # one read, in ranges
        assert await fetch(origin, client, data) == data
        assert len(origin.reads) == 3
        assert relay.counters.served_bytes == 2000 + 6 * len(data)


async def test_an_asker_who_hangs_up_does_not_end_the_read_for_the_others(tmp_path):
    data = blob(1)
    origin = Origin(data)
    origin.gate.clear()
    async with relaying(tmp_path, origin) as (_, client):
        first = asyncio.create_task(client.get(key_of(data)))
        await asyncio.sleep(0.05)
        first.cancel()
        second = asyncio.create_task(client.get(key_of(data)))
        await asyncio.sleep(0.05)
        origin.gate.set()
        assert await second == data
        assert len(origin.reads) == 1


async def test_an_asker_hears_while_a_slow_object_is_still_on_its_way(tmp_path, monkeypatch):
    monkeypatch.setattr("headway.weight_sync.relay.HOLD_S", 0.02)
    data = blob(1)
    origin = Origin(data)
    origin.gate.clear()
    async with relaying(tmp_path, origin) as (_, client):
        asking = asyncio.create_task(client.get(key_of(data)))
        await asyncio.sleep(0.1)
        assert not asking.done()
        assert (await status(client, key_of(data), Authorization=f"Bearer {TOKEN}"))[0] == 202
        origin.gate.set()
        assert await asking == data


async def test_without_the_token_nothing_is_served(tmp_path):
    data = blob(1)
    async with relaying(tmp_path, Origin(data)) as (relay, client):
        assert await client.get(key_of(data)) == data
        for token in ("", "Bearer wrong", f"Basic {TOKEN}"):
            assert (await status(client, key_of(data), Authorization=token))[0] == 401
        assert (await status(client, "health"))[0] == 200
        assert relay.counters.refused == 3


@pytest.mark.parametrize(
    "path", ["demo/ckpt/x", "demo/weights/%2e%2e/x.shard", f"other/weights/{'0' * 64}.shard", "demo/weights/x"]
)
async def test_only_weights_of_the_run_are_relayed(tmp_path, path):
    origin = Origin()
    async with relaying(tmp_path, origin) as (_, client):
        assert (await status(client, path, Authorization=f"Bearer {TOKEN}"))[0] == 404
        assert origin.reads == []


async def test_bytes_of_another_digest_are_never_served_and_the_agent_finds_the_right_ones_itself(tmp_path):
    data = blob(1)
    bad, good = Origin(data), Origin(data)
    bad.objects[key_of(data)] = data[:-1] + b"!"
    async with relaying(tmp_path, bad) as (_, client):
        with pytest.raises(UnavailableError, match="502"):
            await client.get(key_of(data))
        assert await fetch(good, client, data) == data
        with pytest.raises(WireError):
            await fetch(bad, client, data)


async def test_a_relay_that_lies_is_not_believed_a_second_time(tmp_path):
    data = blob(1)
    origin, lies = Origin(data), []

    class Liar:
        async def get_range(self, key, start, end, size_bytes):
            lies.append(start)
            return b"\0" * (end - start)

    assert await fetch(origin, Liar(), data) == data
    assert sorted(lies) == [0, 1000, 2000]


async def test_the_least_recently_used_go_first_and_never_what_is_being_served(tmp_path):
    blobs = [blob(seed, 1000) for seed in range(4)]
    shelf = Shelf(tmp_path, 2500)
    names = [key_of(data).removeprefix(PREFIX) for data in blobs]
    await shelf.put(names[0], blobs[0])
    await shelf.put(names[1], blobs[1])
    with shelf.lent(names[0]):
        pass
    await shelf.put(names[2], blobs[2])
    assert [shelf.has(name) for name in names] == [True, False, True, False]
    with shelf.lent(names[0]) as path:
        await shelf.put(names[3], blobs[3])
        assert path.read_bytes() == blobs[0]
        assert [shelf.has(name) for name in names] == [True, False, False, True]
        assert not shelf.fits(2000)
        with shelf.lent(names[3]), pytest.raises(UnavailableError, match="do not fit"):
            await shelf.put(names[1], blobs[1])
    assert (shelf.held_bytes, shelf.evictions) == (2000, 2)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == 2000


async def test_what_is_held_survives_a_restart_and_an_outage_of_the_origin(tmp_path, monkeypatch):
    monkeypatch.setattr("headway.weight_sync.relay.REFUSED_S", 0.01)
    held, rotten, absent = blob(1), blob(2), blob(3)
    origin = Origin(held, rotten, absent)
    async with relaying(tmp_path, origin) as (_, client):
        await client.get(key_of(held))
        await client.get(key_of(rotten))
    (tmp_path / f"{digest_of(absent)}.shard.partial").write_bytes(absent[:100])
    file = tmp_path / f"{digest_of(rotten)}.shard"
    file.write_bytes(rotten[:-1] + b"!")
    origin.down = True
    origin.reads.clear()
    async with relaying(tmp_path, origin) as (_, client):
        assert not list(tmp_path.glob("*.partial"))
        assert await client.get_range(key_of(held), 10, 20, len(held)) == held[10:20]
        assert origin.reads == []
        for data in (rotten, absent):
            with pytest.raises(UnavailableError, match=r"503.*origin is down"):
                await client.get(key_of(data))
        assert not file.exists()
        origin.down = False
        await asyncio.sleep(0.02)
        assert await client.get(key_of(rotten)) == rotten


async def test_an_object_that_is_nowhere_is_missing_and_not_asked_for_again(tmp_path):
    origin, data = Origin(), blob(1)
    async with relaying(tmp_path, origin) as (_, client):
        with pytest.raises(MissingBlob):
            await client.get(key_of(data))
        with pytest.raises(MissingBlob):
            await fetch(origin, client, data[:500])
        assert len(origin.reads) == 3


async def test_a_read_that_fails_as_nobody_thought_of_is_told_and_asked_for_again(tmp_path, monkeypatch):
    monkeypatch.setattr("headway.weight_sync.relay.REFUSED_S", 0.0)
    data = blob(1)
    origin = Origin(data)
    origin.down, origin.failure = True, RuntimeError("a bug")
    async with relaying(tmp_path, origin) as (_, client):
        with pytest.raises(UnavailableError, match="RuntimeError"):
            await client.get(key_of(data))
        origin.down = False
        await asyncio.sleep(0.01)
        assert await client.get(key_of(data)) == data


async def test_an_object_too_large_for_the_relay_comes_from_the_origin(tmp_path):
    data = blob(1)
    origin = Origin(data)
    async with relaying(tmp_path, origin, bytes_max=2000) as (_, client):
        with pytest.raises(UnavailableError, match="507"):
            await client.get_range(key_of(data), 0, 10, len(data))
        assert await fetch(origin, client, data) == data


async def test_a_relay_that_is_down_is_passed_over_for_a_while(tmp_path):
    data, asked = blob(1), []

    class Down:
        async def get_range(self, key, start, end, size_bytes):
            asked.append(start)
            raise SourceDown("nobody answers")

    times_s = [0.0]
    getter = downloader(Origin(data), Down())
    getter.retrier = Retrier(limits=LIMITS, rng=random.Random(0), clock=lambda: times_s[-1])
    for now_s, asks in ((0.0, 1), (59.0, 1), (61.0, 2)):
        times_s.append(now_s)
        assert await getter.get(key_of(data), lambda found: found, size_bytes=1000) == data[:1000]
        assert len(asked) == asks


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of one MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)]
    if (done := subprocess.run(mount, capture_output=True, text=True, check=False)).returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    yield small
    subprocess.run(["umount", "-l", str(small)], check=True)


async def test_a_full_disk_makes_room_or_sends_agents_to_the_origin(small_disk):
    first, second, large = blob(1, 600_000), blob(2, 600_000), blob(3, 1_100_000)
    origin = Origin(first, second, large)
    async with relaying(small_disk, origin, bytes_max=1 << 30) as (relay, client):
        for data in (first, second, first, large):
            assert await fetch(origin, client, data) == data
        assert relay._shelf.evictions == 3
        assert relay.counters.misses >= 4  # one more for each few seconds that fetching took
        assert list(small_disk.iterdir()) == []
        (small_disk / "ballast").write_bytes(b"\0" * 900_000)
        reads = len(origin.reads)
        assert await fetch(origin, client, first) == first
        assert len(origin.reads) > reads


@pytest.mark.parametrize("outage_s", [30.0, math.inf])
async def test_an_origin_that_is_down_for_30_s_delays_and_one_that_stays_down_is_named(outage_s):
    data, now_s, waits = blob(1, 2000), 0.0, []

    class Flaky(Origin):
        async def get_range(self, key, start, end):
            self.down = start > 0 and now_s < outage_s
            return await super().get_range(key, start, end)

    async def sleep(wait_s):
        nonlocal now_s
        waits.append(wait_s)
        now_s += wait_s

    origin = Flaky(data)
    limits = TransferLimits(range_bytes=1000)
    retrier = Retrier(limits=limits, rng=random.Random(0), sleep=sleep, clock=lambda: now_s)
    getter = Downloader(origin=origin, retrier=retrier)
    if math.isinf(outage_s):
        with pytest.raises(UnavailableError, match="origin is down"):
            await getter.get(key_of(data), lambda found: found, size_bytes=len(data))
        return
    assert await getter.get(key_of(data), lambda found: found, size_bytes=len(data)) == data
    assert now_s >= 30
    assert max(waits) <= limits.wait_s_max
    assert [start for _, start, _ in origin.reads].count(0) == 1, "a range that had arrived was fetched again"


async def test_the_rate_stays_under_the_cap():
    data, now_s = blob(1, 10_000), 0.0

    async def sleep(wait_s):
        nonlocal now_s
        now_s = max(now_s, at_s + wait_s)

    at_s, origin = 0.0, Origin(data)
    limits = TransferLimits(range_bytes=1000, bytes_per_s_max=2000.0, parallel=1)
    retrier = Retrier(limits=limits, rng=random.Random(0), sleep=sleep, clock=lambda: now_s)
    real = origin.get_range

    async def get_range(key, start, end):
        nonlocal at_s
        at_s = now_s
        assert now_s >= start / 2000.0
        return await real(key, start, end)

    origin.get_range = get_range
    await Downloader(origin=origin, retrier=retrier).get(key_of(data), lambda found: found, size_bytes=len(data))
    assert now_s == pytest.approx(4.5)


async def test_no_more_ranges_are_in_flight_than_the_limit_says():
    data, running, most = blob(1, 10_000), 0, 0

    class Busy(Origin):
        async def get_range(self, key, start, end):
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.001)
            running -= 1
            return await super().get_range(key, start, end)

    limits = TransferLimits(range_bytes=500, parallel=3)
    getter = Downloader(origin=Busy(data), retrier=Retrier(limits=limits, rng=random.Random(0)))
    get = getter.get(key_of(data), lambda found: found, size_bytes=len(data))
    again = getter.get(key_of(data), lambda found: found, size_bytes=len(data))
    assert await asyncio.gather(get, again) == [data, data]
    assert most == 3


async def test_a_token_that_is_no_text_is_a_wrong_one(tmp_path):
    async with relaying(tmp_path, Origin(data := blob(1))) as (_, client):
        host, _, port = client._url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /%s HTTP/1.0\r\nAuthorization: Bearer \xff\r\n\r\n" % key_of(data).encode())
        assert b" 401 " in await reader.readline()
        writer.close()
        await writer.wait_closed()
