"""The ranks of one trainer: which tensors each owns, and how what they compute is put together.

A tensor belongs to one rank whole. Ranks add in the order of micro-batches, each for the tensors it owns, so sums have
the bits that one rank gets: no order of addition hangs on how many ranks there are. Bytes and plain numbers travel;
nothing is pickled.

`Mesh` is a trainer of one process; `Ranks` are several, under torch.distributed.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from headway.schemas.errors import ConfigError, UnavailableError

Shapes = Mapping[str, tuple[int, ...]]
PATIENCE_S = 600.0
"""How long a rank waits for the others to get where it is, unless HEADWAY_RANK_PATIENCE_S says otherwise."""
IDLE = timedelta(days=365)
"""For an order of rank 0, which waits for rollouts, the others wait as long as it takes; should it die, its connections
end."""
ALIGN_BYTES = 64
LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Layout:
    """Tensors by name, and which of them each rank owns, sorted."""

    shapes: Shapes
    owned: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, shapes: Shapes, ranks: int) -> Layout:
        """The largest tensor first, to whoever has the fewest elements. Raises ConfigError when some would get none."""
        held, found = [0] * ranks, [list[str]() for _ in range(ranks)]
        for name in sorted(shapes, key=lambda name: (-math.prod(shapes[name]), name)):
            rank = held.index(min(held))
            held[rank] += math.prod(shapes[name])
            found[rank].append(name)
        if not all(found):
            raise ConfigError(f"{ranks} ranks for {len(shapes)} tensors", why="a tensor belongs to one rank whole")
        return cls(shapes, tuple(tuple(sorted(names)) for names in found))

    def elements(self, rank: int) -> int:
        return sum(math.prod(self.shapes[name]) for name in self.owned[rank])

    def join(self, tensors: Mapping[str, Tensor], rank: int) -> Tensor:
        """Those of `rank` as one vector [elements]."""
        return torch.cat([tensors[name].reshape(-1) for name in self.owned[rank]])

    def split(self, flat: Tensor, rank: int) -> dict[str, Tensor]:
        """The inverse of `join`, as views."""
        names = self.owned[rank]
        parts = flat.split([math.prod(self.shapes[name]) for name in names])
        return {name: part.view(self.shapes[name]) for name, part in zip(names, parts, strict=True)}


class Mesh:
    """One rank, which owns everything."""

    rank, size = 0, 1
    patience_s = PATIENCE_S
    attempt = ""
    """An id that ranks which were started together have in common."""

    def add_in_order(
        self, layout: Layout, sums: dict[str, Tensor], found: Mapping[str, Tensor] | None, adds: Sequence[bool]
    ) -> None:
        """Add to `sums`, of the f32 tensors that this rank owns, what each rank found of them, in the order of ranks.

        `found` holds all tensors, or is None where this rank has nothing to add; `adds` says of which ranks anything
        is due.
        """
        if found is not None:
            for name, total in sums.items():
                total += found[name]

    def gather(self, data: bytes) -> list[bytes]:
        """What each rank gives, in the order of ranks."""
        return [data]

    def merge(self, values: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
        """Numbers that one rank each knows, on all of them, in the order of `names`."""
        return {name: values[name] for name in names}

    def spread(self, parts: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Each rank's tensors as that rank has them in `parts`; of the others' only dtypes and shapes count there."""
        return parts

    def collect(self, layout: Layout, mine: dict[str, Tensor]) -> dict[str, Tensor]:
        """On rank 0 everybody's f32 tensors, elsewhere one's own; those without a copy."""
        return mine

    def hand_out(self, layout: Layout, whole: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The inverse of `collect`: each rank's share of what rank 0 has."""
        return whole

    def require_alike(self, facts: Mapping[str, str]) -> None:
        """Raises ConfigError on a rank of which something else holds than of rank 0."""

    def tell(self, verb: str, parts: Sequence[bytes] = ()) -> None:
        """On rank 0: let the others know what it is about to do."""

    def close(self) -> None:
        """Nothing goes between the ranks any more."""


class Ranks(Mesh):
    """This process among those that torchrun started, or whoever set the same variables.

    All ranks call the same methods in the same order, `hear` where rank 0 calls `tell`. Each raises UnavailableError,
    at once when a rank is gone, after `patience_s` (gloo waits up to twice that) when one is silent.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Meets the others. Raises ConfigError when the variables do not say where and as whom."""
        try:
            self.rank, self.size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
            self.patience_s = float(environ.get("HEADWAY_RANK_PATIENCE_S") or PATIENCE_S)
            if environ["MASTER_ADDR"] in LOOPBACK:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        except (KeyError, ValueError) as error:
            raise ConfigError(
                "a rank that does not know of the others", why=repr(error), hint="let torchrun set RANK and the like"
            ) from None
        with self._together():
            patience = timedelta(seconds=self.patience_s)
            dist.init_process_group("gloo", timeout=patience)
            self._idle = dist.new_group(backend="gloo", timeout=IDLE if self.rank else patience)
        self.attempt = self._broadcast([secrets.token_hex(8).encode()])[0].decode()

    def add_in_order(
        self, layout: Layout, sums: dict[str, Tensor], found: Mapping[str, Tensor] | None, adds: Sequence[bool]
    ) -> None:
        if not any(adds):
            return
        counts = [layout.elements(rank) for rank in range(self.size)]
        mine = counts[self.rank]
        sent = torch.zeros(sum(counts))
        if found is not None:
            sent = torch.cat([layout.join(found, rank) for rank in range(self.size)])
        got = torch.empty(self.size, mine)
        with self._together():
            dist.all_to_all_single(got.view(-1), sent, [mine] * self.size, counts)
        for theirs, due in zip(got, adds, strict=False):
            if due:
                for name, part in layout.split(theirs, self.rank).items():
                    sums[name] += part

    def gather(self, data: bytes) -> list[bytes]:
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        with self._together():
            dist.all_gather(counts, torch.tensor([len(data)]))
        lengths = [int(count) for count in counts]
        padded = torch.zeros(max(1, *lengths), dtype=torch.uint8)
        padded[: len(data)] = _tensor(data)
        found = [torch.empty_like(padded) for _ in lengths]
        with self._together():
            dist.all_gather(found, padded)
        return [part[:length].numpy().tobytes() for part, length in zip(found, lengths, strict=True)]

    def merge(self, values: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
        summed = torch.tensor([values.get(name, 0.0) for name in names], dtype=torch.float64)
        with self._together():
            dist.all_reduce(summed)  # exact in any order: each is of one rank, zero everywhere else
        return dict(zip(names, summed.tolist(), strict=True))

    def spread(self, parts: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        found = []
        for rank, part in enumerate(parts):
            flat, tensors = _side_by_side(part)
            if rank == self.rank:
                for name, tensor in part.items():
                    tensors[name].copy_(tensor)
            with self._together():
                dist.broadcast(flat, rank)
            found.append(tensors)
        return found

    def collect(self, layout: Layout, mine: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.rank:
            with self._together():
                dist.send(layout.join(mine, self.rank), 0)
            return mine
        whole = dict(mine)
        for rank in range(1, self.size):
            flat = torch.empty(layout.elements(rank))
            with self._together():
                dist.recv(flat, rank)
            whole |= layout.split(flat, rank)
        return {name: whole[name] for name in sorted(whole)}

    def hand_out(self, layout: Layout, whole: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if self.rank:
            flat = torch.empty(layout.elements(self.rank))
            with self._together():
                dist.recv(flat, 0)
            return layout.split(flat, self.rank)
        for rank in range(1, self.size):
            with self._together():
                dist.send(layout.join(whole, rank), rank)
        return whole

    def require_alike(self, facts: Mapping[str, str]) -> None:
        lines = [f"{name} {value}".encode() for name, value in sorted(facts.items())]
        first = self._broadcast(lines)
        if differ := [line.decode() for line in lines if line not in first]:
            raise ConfigError(
                f"rank {self.rank} is not like rank 0: {'; '.join(differ)[:400]}",
                why="a step's bits would hang on which rank computes what",
                hint="every rank needs the same run.toml, base model, build and kind of machine",
            )

    def tell(self, verb: str, parts: Sequence[bytes] = ()) -> None:
        self._wake()
        self._broadcast([verb.encode(), *parts])

    def hear(self) -> tuple[str, list[bytes]]:
        """On the ranks but 0: what rank 0 told."""
        self._wake()
        verb, *parts = self._broadcast([])
        return verb.decode(), parts

    def close(self) -> None:
        dist.destroy_process_group()

    def _wake(self) -> None:
        with self._together():
            dist.broadcast(torch.zeros(1, dtype=torch.uint8), 0, group=self._idle)

    def _broadcast(self, parts: Sequence[bytes]) -> list[bytes]:
        """Rank 0's parts, on every rank."""
        lengths = torch.tensor([len(part) for part in parts])
        count = torch.tensor([len(parts)])
        with self._together():
            dist.broadcast(count, 0)
        lengths = lengths if self.rank == 0 else torch.empty(int(count), dtype=torch.int64)
        with self._together():
            dist.broadcast(lengths, 0)
        joined = _tensor(b"".join(parts)) if self.rank == 0 else torch.empty(int(lengths.sum()), dtype=torch.uint8)
        with self._together():
            dist.broadcast(joined, 0)
        return [part.numpy().tobytes() for part in joined.split(lengths.tolist())]

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise UnavailableError(
                f"rank {self.rank} of {self.size} has lost another",
                why=str(error)[:300],
                hint=f"that one's log says why (silence is borne for {self.patience_s:g} s); start all ranks again",
            ) from None


def mesh_of(environ: Mapping[str, str]) -> Mesh:
    """The ranks that the environment speaks of, or this process alone. Raises as `Ranks` does."""
    return Ranks(environ) if int(environ.get("WORLD_SIZE") or 1) > 1 else Mesh()


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _side_by_side(like: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Bytes that hold tensors of those dtypes and shapes, and the tensors, which are views of them."""
    starts, end = {}, 0
    for name, tensor in like.items():
        starts[name] = end
        end += -(-tensor.nbytes // ALIGN_BYTES) * ALIGN_BYTES
    flat = torch.zeros(end, dtype=torch.uint8)
    views = {name: flat[at : at + like[name].nbytes].view(like[name].dtype) for name, at in starts.items()}
    return flat, {name: view.view(like[name].shape) for name, view in views.items()}
