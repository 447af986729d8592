"""Recorded expert choices: what is right by itself, and how an engine's array becomes a trajectory's.

Shapes: R rows (row t routed input token t), A all layers, L layers with experts, k experts a token. Ids are
uint8 up to 255 experts, else uint16; the dtype's maximum marks a row of a layer that nobody recorded.
"""

from __future__ import annotations

import numpy as np

from headway.schemas.wire import NDArray

ZERO_ROWS_MIN = 16
"""With one expert a token, this many rows of a layer that all say 0 are padding, not routing."""


def dtype_for(experts: int) -> type[np.uint8] | type[np.uint16]:
    return np.uint8 if experts <= np.iinfo(np.uint8).max else np.uint16


def check(routes: NDArray, experts: int, top_k: int) -> None:
    """What a router could have chosen in [R, L, k]. Raises ValueError naming the first row that it could not.

    Nothing is repaired: half a row, an expert named twice and a layer of zeros are signs that rows or layers
    slipped, and replaying them would train other experts than the rollout used.
    """
    if routes.ndim != 3 or routes.shape[2] != top_k:
        raise ValueError(f"routes of shape {routes.shape} where {top_k} experts a token are due")
    if not routes.size:
        return
    ordered = np.sort(routes, axis=2)
    twice = (ordered[:, :, 1:] == ordered[:, :, :-1]).any(axis=2)
    if int(ordered[:, :, -1].max()) >= experts:  # the sentinel, or a lie
        missing = routes == np.iinfo(routes.dtype).max
        known = ~missing.all(axis=2)
        _refuse(missing.any(axis=2) & known, "misses some of its experts")
        _refuse(((routes >= experts) & ~missing).any(axis=2), f"has an expert outside 0..{experts - 1}")
        twice &= known
    _refuse(twice, "names an expert twice")
    if len(routes) >= ZERO_ROWS_MIN and not routes.any(axis=(0, 2)).all():
        raise ValueError(f"layer {int((~routes.any(axis=(0, 2))).argmax())}: every row says expert 0")


def from_engine(raw: NDArray, layer_map: list[int], experts: int, top_k: int) -> NDArray:
    """An engine's int32 [R, A, k] of all layers, -1 where unknown, as checked [R, L, k]. Raises ValueError."""
    routes, narrow = raw[:, layer_map], dtype_for(experts)
    lowest = int(routes.min(initial=0))
    if not -1 <= lowest <= int(routes.max(initial=0)) < experts:
        raise ValueError(f"an expert id outside 0..{experts - 1}")
    packed = (routes if lowest >= 0 else np.where(routes < 0, np.iinfo(narrow).max, routes)).astype(narrow)
    check(packed, experts, top_k)
    return packed


def _refuse(bad: NDArray, what: str) -> None:
    """bad bool [R, L]."""
    if bad.any():
        row, layer = (int(axis[0]) for axis in np.nonzero(bad))
        raise ValueError(f"row {row} of layer {layer} {what} ({int(bad.sum())} such rows)")
