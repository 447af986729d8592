"""A sandbox host against real boxes, without a bus: sessions, grades, forgeries, idempotency, bounds."""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from headway.sandbox.expr_workspaces import ExprWorkspaces
from headway.sandbox.host import Host, HostSettings
from headway.sandbox.isolation import Box, Limits, Sandbox
from headway.sandbox.pool import Pool
from headway.sandbox.tasks.build import build
from headway.sandbox.tasks.demonstrator import demonstrate
from headway.sandbox.tasks.expr import ExprTask, TaskSet, load_task_set, tasks
from headway.schemas import expr_protocol as p
from headway.schemas import signing
from headway.schemas.errors import InputError, WireError
from headway.schemas.messages import Signed, Verdict

KEY = bytes(range(32))
LIMITS = Limits(command_s=1.0)


class Client:
    """Speaks verbs to a host as an agent would, with a fresh command id each."""

    def __init__(self, host: Host, task_set: TaskSet, clock: list[float]) -> None:
        self.host, self.task_set, self.clock = host, task_set, clock
        self._ids = (f"c{number}" for number in itertools.count())

    async def ask(self, verb: str, **fields: Any) -> dict[str, Any]:
        return await self.host.verbs[verb]({"command_id": next(self._ids), **fields})

    async def create(self, task: ExprTask | None = None) -> str:
        task_id = task.id if task else "train-000-0"
        reply = await self.ask(
            "create", rollout_id="g1s1", attempt="a1", task_set=self.task_set.digest, task_id=task_id
        )
        return str(reply.get("box", reply))

    async def tool(self, box: str, name: str, argument: str = "") -> str:
        reply = await self.ask("tool", box=box, name=name, argument=argument)
        return str(reply.get("text", reply.get("refused")))

    async def grade(self, box: str, submitted: bool = True, malformed: bool = False) -> Verdict:
        reply = await self.ask("grade", box=box, submitted=submitted, malformed=malformed)
        verdict = Signed.model_validate(reply["verdict"]).open_verdict(signing.public_key(KEY))
        assert verdict.reward == reply["reward"]
        return verdict

    async def submit(self, source: str, task: ExprTask) -> Verdict:
        box = await self.create(task)
        await self.ask("write", box=box, path=p.FILE, data=source.encode())
        return await self.grade(box)


@pytest.fixture(scope="module")
def task_set(tmp_path_factory: pytest.TempPathFactory) -> TaskSet:
    folder: Path = tmp_path_factory.mktemp("tasks")
    build(0, folder, sessions=0)
    return load_task_set(folder)


Make = Callable[..., Client]


@pytest.fixture
async def make(task_set: TaskSet) -> AsyncIterator[Make]:
    sandbox = await Sandbox.start(LIMITS)

    made: list[Client] = []

    def make_client(**changes: Any) -> Client:
        clock = [0.0]
        fields = {"run": "r", "host": "h", "key": KEY, "limits": LIMITS, "sessions_max": 4, "idle_s_max": 60.0}
        settings = HostSettings(**{**fields, **changes})
        made.append(
            Client(Host(settings, Pool(sandbox, 2), ExprWorkspaces(task_set), lambda: clock[0]), task_set, clock)
        )
        return made[-1]

    yield make_client
    for client in made:
        await client.host.close()
        await client.host._pool.close()
    await sandbox.close()


@pytest.fixture
def client(make: Make) -> Client:
    return make()


@pytest.fixture
def task(task_set: TaskSet) -> ExprTask:
    return next(task for task in task_set.tasks.values() if task.template == "x*x+A")


async def test_a_session_repairs_a_program_and_earns_one(client: Client, task: ExprTask) -> None:
    box = await client.create(task)
    assert await client.tool(box, "r") == task.text.rstrip("\n")
    assert await client.tool(box, "w", "x*") == "syntax error"
    assert await client.tool(box, "w", "7") == "ok"
    assert await client.tool(box, "t") == f"f(0)=7 want {task.visible[0][1]}"
    assert await client.tool(box, "w", "1/x") == "ok"
    assert await client.tool(box, "t") == "f(0) error"
    assert await client.tool(box, "w", task.gold) == "ok"
    assert await client.tool(box, "t") == "pass"
    verdict = await client.grade(box)
    assert (verdict.reward, verdict.rollout_id, verdict.attempt, verdict.task_id) == (1.0, "g1s1", "a1", task.id)
    assert verdict.parts["passed_fraction"] == 1.0
    assert await client.tool(box, "r") == "gone"


async def test_wrong_and_unsubmitted_and_malformed(client: Client, task: ExprTask) -> None:
    assert (await client.grade(await client.create(task))).reward == 0.0
    assert (await client.grade(await client.create(task), submitted=False)).reward == -0.25
    assert (await client.grade(await client.create(task), malformed=True)).reward == -0.25


async def test_visible_cases_alone_do_not_pass(client: Client, task: ExprTask) -> None:
    known = dict(task.visible)
    verdict = await client.submit(f"def f(x):\n    return {known}.get(x)\n", task)
    assert verdict.reward == 0.0
    assert verdict.parts["passed_fraction"] == 4 / 53


FORGERIES = {
    "prints": "print('PASS' * 99)\n[print('[\"int\", 1]') for _ in range(99)]\ndef f(x): return None",
    "exits": "import os\nos._exit(0)",
    "exits_in_call": "import os\ndef f(x): os._exit(0)",
    "system_exit": "def f(x): raise SystemExit(0)",
    "equal_to_all": "class E(int):\n  __eq__ = lambda *_: True\n  __hash__ = int.__hash__\ndef f(x): return E(1)",
    "no_int": "def f(x): return True",
    "patched_json": "import json\njson.dumps = lambda v: '[\"int\", 1]'\ndef f(x): return None",
    "patched_builtins": "import builtins as b\nb.type = lambda v: int\nb.abs = lambda v: 0\ndef f(x): return {}",
    "writes_results": """
import os
for fd in range(3, 9):
    try: os.write(fd, b'["int", 1]\\n' * 99)
    except OSError: pass
def f(x): return 0
""",
    "nested": """
import os
os.write(3, b'[' * 127 + b'\\n' + b'9' * 6000 + b'\\n')
def f(x): return 10 ** 5000
""",
    "looks_around": """
import gc
def f(x):
    for thing in gc.get_objects():
        if isinstance(thing, dict):
            for name in ('expected', 'visible', 'gold', 'want'):
                if name in thing: return thing[name]
""",
    "crashes": "import ctypes\ndef f(x): ctypes.string_at(0)",
    "is_nothing": "",
}


@pytest.mark.parametrize("name", FORGERIES)
async def test_a_forged_pass_earns_nothing(client: Client, task: ExprTask, name: str) -> None:
    verdict = await client.submit(FORGERIES[name], task)
    assert verdict.reward == 0.0
    assert verdict.parts["right"] == 0.0


async def test_what_a_session_leaves_behind_never_reaches_its_grade(client: Client, task: ExprTask) -> None:
    box = await client.create(task)
    code = """
import os, time
open('/tmp/answers', 'w').write('here'); open('/work/helper.py', 'w').write('here')
if os.fork() == 0:
    os.setsid(); time.sleep(60)
"""
    await client.ask("exec", box=box, code=code)
    checks = "import os\nseen = [os.path.exists(p) for p in ('/tmp/answers', '/work/helper.py')]\n"
    checks += "alone = sorted(p for p in os.listdir('/proc') if p.isdigit())[0] == '1' and "
    checks += "len([p for p in os.listdir('/proc') if p.isdigit()]) == 2\n"
    source = f"{checks}def f(x):\n    return {task.gold} if alone and not any(seen) else None\n"
    await client.ask("write", box=box, path=p.FILE, data=source.encode())
    assert (await client.grade(box)).reward == 1.0


async def test_a_trap_in_place_of_the_file_is_a_wrong_answer(client: Client, task: ExprTask) -> None:
    for make in ("os.mkfifo('f.py')", "os.symlink('/dev/zero', 'f.py')", "open('f.py', 'w').write('#' * 40000)"):
        box = await client.create(task)
        await client.ask("exec", box=box, code=f"import os\nos.remove('f.py')\n{make}")
        assert (await client.grade(box)).reward == 0.0


async def test_an_endless_answer_is_wrong_but_in_lockstep_no_clock_decides(make: Make, task: ExprTask) -> None:
    verdict = await make().submit("def f(x):\n    while True: pass\n", task)
    assert (verdict.reward, verdict.parts["timed_out"]) == (0.0, 1.0)
    strict = make(timeout_is_infra=True)
    box = await strict.create(task)
    await strict.ask("write", box=box, path=p.FILE, data=b"def f(x):\n    while True: pass\n")
    assert (await strict.ask("grade", box=box, submitted=True, malformed=False))["refused"] == "infra"


async def test_a_dead_box_is_infrastructure_and_never_a_reward(client: Client, task: ExprTask) -> None:
    for verb, fields in (("tool", {"name": "t"}), ("grade", {"submitted": True, "malformed": False})):
        box = await client.create(task)
        signal.pidfd_send_signal(client.host._sessions[box].box.pidfd, signal.SIGKILL)
        reply = await client.ask(verb, box=box, **fields)
        assert reply["refused"] == "infra"
        assert "reward" not in reply
        assert await client.tool(box, "r") == "gone"


async def test_a_verdict_with_any_byte_changed_does_not_verify(client: Client, task: ExprTask) -> None:
    reply = await client.ask("grade", box=await client.create(task), submitted=True, malformed=False)
    signed = Signed.model_validate(reply["verdict"])
    signed.open_verdict(signing.public_key(KEY))
    for at in range(0, len(signed.payload), 7):
        forged = bytearray(signed.payload)
        forged[at] ^= 1
        with pytest.raises(WireError):
            Signed(payload=bytes(forged), signature=signed.signature).open_verdict(signing.public_key(KEY))


async def test_a_repeated_command_runs_once(client: Client, task: ExprTask) -> None:
    create = {
        "command_id": "same",
        "rollout_id": "g",
        "attempt": "a",
        "task_set": client.task_set.digest,
        "task_id": task.id,
    }
    first, second = await asyncio.gather(*(client.host.verbs["create"](dict(create)) for _ in range(2)))
    assert first == second
    assert client.host.open_sessions == 1
    code = "open('n', 'a').write('x')"
    for _ in range(3):
        await client.host.verbs["exec"]({"command_id": "once", "box": first["box"], "code": code})
    assert (await client.ask("read", box=first["box"], path="n"))["data"] == b"x"
    grade = {"command_id": "g", "box": first["box"], "submitted": True, "malformed": False}
    assert await client.host.verbs["grade"](dict(grade)) == await client.host.verbs["grade"](dict(grade))


async def test_boxes_are_bounded_and_a_busy_host_is_asked_again(client: Client, task: ExprTask) -> None:
    boxes = await asyncio.gather(*(client.create(task) for _ in range(4)))
    request = {
        "command_id": "more",
        "rollout_id": "g",
        "attempt": "a",
        "task_set": client.task_set.digest,
        "task_id": task.id,
    }
    assert (await client.host.verbs["create"](dict(request)))["refused"] == "busy"
    assert await client.ask("destroy", box=boxes[0]) == {"destroyed": True}
    assert await client.ask("destroy", box=boxes[0]) == {"destroyed": False}
    assert "box" in await client.host.verbs["create"](dict(request))


async def test_a_box_of_a_host_that_was_restarted_is_gone_and_no_other(make: Make, task: ExprTask) -> None:
    box = await make().create(task)
    again = make()
    await again.create(task)
    assert await again.tool(box, "r") == "gone"


async def test_idle_boxes_are_reaped(client: Client, task: ExprTask) -> None:
    idle, used = await client.create(task), await client.create(task)
    client.clock[0] = 50.0
    await client.tool(used, "r")
    client.clock[0] = 100.0
    assert await client.host.reap_idle() == 1
    assert await client.tool(idle, "r") == "gone"
    assert await client.tool(used, "r") == task.text.rstrip("\n")


async def test_a_session_that_ends_or_goes_on_while_another_is_reaped_is_left_alone(
    client: Client, task: ExprTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ended, used = [await client.create(task) for _ in range(3)]
    client.clock[0] = 100.0
    destroy = Box.destroy

    async def slowly(box: Box) -> None:
        monkeypatch.setattr(Box, "destroy", destroy)
        await client.ask("destroy", box=ended)
        await client.tool(used, "r")
        await destroy(box)

    monkeypatch.setattr(Box, "destroy", slowly)
    assert await client.host.reap_idle() == 1
    assert await client.tool(used, "r") == task.text.rstrip("\n")


async def test_boxes_are_made_where_descriptors_are_beyond_what_select_can_name(client: Client, task: ExprTask) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    held = []
    try:
        while not held or held[-1] < 1100:
            held.append(os.dup(0))
        assert (await client.submit("def f(x):\n    return 1\n", task)).reward == 0.0
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_host_out_of_descriptors_refuses_as_infrastructure(client: Client, task: ExprTask) -> None:
    box = await client.create(task)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        refused = await client.ask("grade", box=box, submitted=True, malformed=False)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert refused["refused"] == "infra"


async def test_bad_requests_are_refused(client: Client, task: ExprTask) -> None:
    box = await client.create(task)
    for path in ("/etc/passwd", "../x", "a/../../x", ""):
        assert (await client.ask("read", box=box, path=path))["refused"] == "invalid"
    assert (await client.ask("read", box=box, path="absent"))["status"] == 1
    for verb, fields in (("tool", {"name": "x"}), ("grade", {}), ("tool", {"name": "w", "argument": "1" * 99})):
        with pytest.raises(InputError):
            await client.ask(verb, box=box, **fields)
    request = {"rollout_id": "g", "attempt": "a"}
    assert (await client.ask("create", **request, task_set="0" * 64, task_id="x"))["refused"] == "invalid"
    assert (await client.ask("create", **request, task_set=client.task_set.digest, task_id="x"))["refused"] == "invalid"


async def test_a_full_workspace_is_told_to_the_session(client: Client, task: ExprTask) -> None:
    box = await client.create(task)
    await client.ask("exec", box=box, code="import os\nos.remove('f.py')\nopen('big','wb').write(bytes(8 << 20))")
    assert await client.tool(box, "w", "x") == "no space"
    assert (await client.grade(box)).reward == 0.0


async def test_warm_boxes_are_fresh_and_replaced(client: Client, task: ExprTask) -> None:
    pool = client.host._pool
    refill = asyncio.create_task(pool.run())
    async with asyncio.timeout(5):
        while pool.warm < 2:
            await asyncio.sleep(0.01)
        dead = await pool.take()
        signal.pidfd_send_signal(pool._warm._queue[0].pidfd, signal.SIGKILL)  # type: ignore[attr-defined]
        await asyncio.sleep(0.05)
        assert (await client.submit(f"def f(x): return {task.gold}", task)).reward == 1.0
        await dead.destroy()
        while pool.warm < 2:
            await asyncio.sleep(0.01)
    refill.cancel()
    await asyncio.wait([refill])


async def test_demonstrations_show_what_a_real_sandbox_answers(client: Client) -> None:
    pairs = list(tasks(0))
    kinds = set()
    for number in range(30):
        gold, task = pairs[number * 71 % len(pairs)]
        session = demonstrate(gold, task, Random(number))
        box = await client.create(task)
        texts = [text for text, _ in session.segments]
        for line, shown in zip(texts[1::2], texts[2::2], strict=False):
            action = p.parse_action(line.encode())
            assert action is not None
            answer = p.observation(await client.tool(box, action.tool, action.argument)).decode()
            assert answer == shown
            kinds.add(action.tool)
        right = session.written.values(p.HIDDEN_INPUTS) == gold.values(p.HIDDEN_INPUTS)
        assert (await client.grade(box)).reward == float(right)
    assert kinds == {"r", "w", "t"}
