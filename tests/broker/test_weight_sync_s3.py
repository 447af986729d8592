"""Weight versions through a real S3 protocol server."""

import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from headway.bus.blobs import ObstoreBlobs
from headway.schemas import signing
from headway.schemas.errors import UnavailableError
from headway.schemas.subjects import Keys
from headway.schemas.version import Version
from headway.weight_sync.fetcher import Fetcher
from headway.weight_sync.mirror import HostMirror
from headway.weight_sync.publisher import Publisher, PublishSettings
from headway.weight_sync.relay import Relay
from headway.weight_sync.relay_client import RelayClient
from headway.weight_sync.shelf import Shelf
from headway.weight_sync.tensors import RawTensor
from headway.weight_sync.transfer import Retrier, TransferLimits

KEY = bytes(range(32))
START_S_MAX = 30.0


def request(url: str, method: str = "GET") -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=2) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    except OSError:
        return 0


@pytest.fixture(scope="module")
def s3_url(tmp_path_factory):
    """The address of a moto server with the bucket `headway`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = (tmp_path_factory.mktemp("moto") / "log").open("wb")
    command = [str(Path(sys.executable).with_name("moto_server")), "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=log, stderr=log)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S_MAX
    try:
        while request(f"{url}/moto-api/") != 200:
            assert server.poll() is None, "moto_server ended"
            assert time.monotonic() < deadline, "moto_server did not come up"
            time.sleep(0.1)
        assert request(f"{url}/headway", "PUT") == 200
        yield url
    finally:
        server.terminate()
        server.wait(10)
        log.close()


@pytest.fixture
def store(s3_url, monkeypatch):
    for name, value in {
        "AWS_ENDPOINT_URL": s3_url,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    return ObstoreBlobs.open("s3://headway", attempts=2)


def weights(seed, base=None):
    rng = np.random.default_rng(seed)
    if base is None:
        lanes = rng.integers(0x3C00, 0x3D00, 60_000).astype("<u2")
    else:
        lanes = base["w"].data.view("<u2") + (rng.random(60_000) < 0.3).astype("<u2")
    return {"w": RawTensor(dtype="BF16", shape=(60_000,), data=lanes.view(np.uint8))}


async def test_versions_travel_through_s3_and_a_relay_and_a_republish_changes_nothing(store, tmp_path):
    settings = PublishSettings(chunk_bytes=8192, shard_bytes=1 << 15, anchor_every=8)
    keys = Keys("s3run")
    publisher = Publisher(store=store, keys=keys, private_key=KEY, settings=settings)
    base, _ = await publisher.publish(Version(0, 0), weights(0), None)
    head, _ = await publisher.publish(Version(0, 1), weights(1, base.tensors), base)
    objects = sorted([item async for item in store.list("s3run/weights")])
    again, _ = await publisher.publish(Version(0, 1), head.tensors, base)
    assert again.digest == head.digest
    assert sorted([item async for item in store.list("s3run/weights")]) == objects
    assert len(objects) == 2 + len(base.manifest.shards) + len(head.manifest.shards)

    limits = TransferLimits(attempts_max=2, wait_s=0.01)

    def fetcher_of(origin, relay=None):
        retrier = Retrier(limits=limits, rng=random.Random(0))
        return Fetcher(store=origin, keys=keys, public_key=signing.public_key(KEY), retrier=retrier, relay=relay)

    fetcher = fetcher_of(store.once())
    mirror = HostMirror(tmp_path / "mirror", signing.public_key(KEY), fsync=False)
    for version in (base, head):
        mirror.commit(await fetcher.stage(version.version, version.digest, mirror))
        assert mirror.tensors["w"].tobytes() == version.tensors["w"].data.tobytes()
    assert mirror.root == head.manifest.root

    relay = Relay(Shelf(tmp_path / "shelf", 1 << 20), store.once(), "s3run/weights/", "secret", limits)
    runner = web.AppRunner(relay.app(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession() as http:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        through = fetcher_of(None, RelayClient(http, url, "secret"))
        for name in ("one", "two"):
            agent = HostMirror(tmp_path / name, signing.public_key(KEY), fsync=False)
            for version in (base, head):
                agent.commit(await through.stage(version.version, version.digest, agent))
            assert agent.root == head.manifest.root
    await runner.cleanup()
    sizes = [size for _, size in objects]
    assert (relay.counters.misses, relay.counters.origin_bytes) == (len(sizes), sum(sizes))

    await store.delete(keys.shard(head.manifest.shards[0].sha256))
    cold = HostMirror(tmp_path / "cold", signing.public_key(KEY), fsync=False)
    with pytest.raises(UnavailableError, match=head.manifest.shards[0].sha256):
        await fetcher.stage(head.version, head.digest, cold)
