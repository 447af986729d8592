"""The sandbox service: a host on the bus. Entry: `run_service("sandbox", config, serve)`.

It needs the task set in `<run folder>/tasks` and the signing key; the dispatcher names the set by digest, so
hidden values never ride on the bus. SIGTERM: no new sessions, the open ones may finish for DRAIN_S_MAX.
"""

from __future__ import annotations

import asyncio

import structlog

from headway.bus import rpc
from headway.bus.service import Service
from headway.sandbox.host import Host, HostSettings
from headway.sandbox.isolation import Limits, Sandbox
from headway.sandbox.pool import Pool
from headway.sandbox.workspaces import workspaces_of
from headway.schemas import signing
from headway.schemas.errors import UnavailableError
from headway.schemas.sections import SandboxConfig

DRAIN_S_MAX = 30.0
REAP_EVERY_S = 2.0
POLL_S = 0.1
QUEUE = "sandbox"
CONCURRENT_MAX = 64
log = structlog.get_logger()


def limits_of(config: SandboxConfig) -> Limits:
    return Limits(
        memory_bytes=config.memory_bytes,
        processes=config.max_processes,
        work_bytes=config.workspace_bytes,
        tmp_bytes=config.workspace_bytes,
        output_bytes=config.output_bytes,
        command_s=config.command_timeout_s,
    )


async def serve(service: Service) -> None:
    """Serve until `service.stop`. Raises UnavailableError when no box can be made, or none any more."""
    config, settings = service.config.sandbox, service.settings
    workspaces = workspaces_of(service.config.tasks, settings.run_dir / "tasks")
    key = signing.load_key(settings.sandbox_key())
    limits = limits_of(config)
    sandbox = await Sandbox.start(limits)
    pool = Pool(sandbox, config.pool_size)
    host_settings = HostSettings(
        run=service.config.run.name,
        host=settings.instance,
        key=key,
        limits=limits,
        sessions_max=config.max_boxes,
        idle_s_max=config.idle_timeout_s,
        timeout_is_infra=service.config.run.lockstep,
    )
    host = Host(host_settings, pool, workspaces)
    try:
        background = [
            service.tasks.create_task(task)
            for task in (pool.run(), _watch(sandbox, service), _reap(host), _report(host, pool, service))
        ]
        await _serve_verbs(host, service)
        for task in background:
            task.cancel()
        await asyncio.wait(background)
        await host.close()
        await pool.close()
    finally:
        await sandbox.close()


async def _serve_verbs(host: Host, service: Service) -> None:
    client, subjects, region = service.bus.client, service.bus.subjects, service.settings.region
    for verb, handler in host.verbs.items():
        if verb != "create":
            subject = subjects.sandbox_verb(region, service.settings.instance, verb)
            await rpc.serve(client, subject, handler, tasks=service.tasks, concurrent_max=CONCURRENT_MAX)
    create = await rpc.serve(
        client,
        subjects.sandbox_create(region),
        host.verbs["create"],
        tasks=service.tasks,
        queue=QUEUE,
        concurrent_max=CONCURRENT_MAX,
    )
    service.status["phase"] = "serving"
    log.info("sandbox_ready", region=region)
    await service.stop.wait()
    host.draining = True
    service.status["phase"] = "draining"
    await create.unsubscribe()
    end_s = asyncio.get_running_loop().time() + DRAIN_S_MAX
    while host.open_sessions and asyncio.get_running_loop().time() < end_s:  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)
    log.info("sandbox_drained", left=host.open_sessions, **host.counters)


async def _watch(sandbox: Sandbox, service: Service) -> None:
    await sandbox.ended()
    if not service.stop.is_set():
        raise UnavailableError("the sandbox's fork server died, and every box with it", hint="out of memory?")


async def _reap(host: Host) -> None:
    while True:
        await asyncio.sleep(REAP_EVERY_S)
        if count := await host.reap_idle():
            log.warning("idle_boxes_reaped", count=count)


async def _report(host: Host, pool: Pool, service: Service) -> None:
    while True:
        service.status.update(boxes=host.open_sessions, warm=pool.warm, **host.counters)
        await asyncio.sleep(1.0)
