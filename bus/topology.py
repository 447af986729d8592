"""The streams and consumers of a run, declared once. Applying twice changes nothing."""

from __future__ import annotations

from dataclasses import dataclass

from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import NotFoundError

from headway.schemas.subjects import Subjects

MESSAGE_BYTES_MAX = 1 << 20
DUPLICATE_WINDOW_S = 600.0
AGENTS_CONSUMER = "agents"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Every stream has limits retention, so that everything is replayable.

    TASKS and ROLLOUTS push back when full (`discard=new`) instead of forgetting.
    """

    run: str
    ack_wait_s: float = 30.0
    max_ack_pending: int = 1000
    max_stream_bytes: int = 1 << 30
    replicas: int = 1

    def streams(self) -> list[StreamConfig]:
        run = self.run
        layout = {
            "TASKS": [f"rl.{run}.task.>"],
            "ROLLOUTS": [f"rl.{run}.rollout.>"],
            "STAMPS": [f"rl.{run}.stamp.>"],
            "WEIGHTS": [f"rl.{run}.weights.>"],
            "LEDGER": [f"rl.{run}.ledger.>"],
            "EVENTS": [f"rl.{run}.event.>", f"rl.{run}.applied.>", f"rl.{run}.dead.>"],
        }
        full = {"TASKS", "ROLLOUTS", "LEDGER"}
        return [
            StreamConfig(
                name=Subjects(run).stream(suffix),
                subjects=subjects,
                retention=RetentionPolicy.LIMITS,
                storage=StorageType.FILE,
                discard=DiscardPolicy.NEW if suffix in full else DiscardPolicy.OLD,
                max_bytes=self.max_stream_bytes,
                max_msg_size=MESSAGE_BYTES_MAX,
                duplicate_window=DUPLICATE_WINDOW_S,
                num_replicas=self.replicas,
                allow_direct=True,
            )
            for suffix, subjects in layout.items()
        ]

    def agents_consumer(self) -> ConsumerConfig:
        """The work queue of all agents. Redelivers for ever: an agent, not the server, gives a task up."""
        return ConsumerConfig(
            durable_name=AGENTS_CONSUMER,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=self.ack_wait_s,
            max_deliver=-1,
            max_ack_pending=self.max_ack_pending,
            max_waiting=512,
        )

    async def apply(self, js: JetStreamContext) -> None:
        """Create what is missing and update what differs."""
        for stream in self.streams():
            try:
                await js.stream_info(str(stream.name))
            except NotFoundError:
                await js.add_stream(stream)
            else:
                await js.update_stream(stream)
        await js.add_consumer(Subjects(self.run).stream("TASKS"), self.agents_consumer())
