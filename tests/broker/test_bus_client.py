"""What a listener of ours hears is what a subscription of nats-py's hears, from a real server."""

from __future__ import annotations

import asyncio

from nats.aio.msg import Msg

from headway.bus.connection import Bus

Heard = list[tuple[object, ...]]


async def heard(messages: Heard, count: int) -> None:
    async with asyncio.timeout(5):
        while len(messages) < count:
            await asyncio.sleep(0.01)


async def test_a_listener_hears_what_a_subscription_hears(bus: Bus) -> None:
    client, ours, theirs = bus.client, Heard(), Heard()

    async def take(message: Msg) -> None:
        theirs.append((message.headers or {}, message.data))

    inboxes = [client.new_inbox(), client.new_inbox()]
    await client.listen(inboxes[0], lambda _, *rest: ours.append(rest))
    await client.subscribe(inboxes[1], cb=take)
    for number, headers in enumerate([None, {"One": "1", "Two": "2"}, {"Spaced": " a b ", "Broken": "a\r\nb: c"}]):
        for inbox in inboxes:
            await client.publish(inbox, b"x" * 70_000 * number, headers=headers)
    for inbox in inboxes:
        await client.publish("nobody.listens", reply=inbox)  # no responders: a status and no body
    await heard(ours, 4)
    await heard(theirs, 4)
    assert ours == theirs
    assert [headers.get("Status") for headers, _ in ours] == [None, None, None, "503"]


async def test_a_listener_that_fails_does_not_end_the_reading(bus: Bus, monkeypatch) -> None:
    errors, found = list[Exception](), Heard()

    async def note(error: Exception) -> None:
        errors.append(error)

    def take(subject: str, headers: dict[str, str], body: bytes) -> None:
        if body == b"bad":
            raise ValueError("bad")
        found.append((subject, headers, body))

    monkeypatch.setattr(bus.client, "_error_cb", note)
    inbox = bus.client.new_inbox()
    subscription = await bus.client.listen(inbox, take)
    for body in (b"bad", b"good"):
        await bus.client.publish(inbox, body)
    await heard(found, 1)
    assert [str(error) for error in errors] == ["bad"]
    await subscription.unsubscribe()
    await bus.client.publish(inbox, b"late")
    await bus.client.flush()
    assert found == [(inbox, {}, b"good")]
    assert subscription._id not in bus.client._listeners


async def test_a_listener_hears_again_after_a_reconnect(bus: Bus, nats_process) -> None:
    found, inbox = Heard(), bus.client.new_inbox()
    await bus.client.listen(inbox, lambda *message: found.append(message))
    nats_process.kill()
    await nats_process.start()
    while not bus.client.is_connected:
        await asyncio.sleep(0.05)
    await bus.client.publish(inbox, b"back")
    await heard(found, 1)
