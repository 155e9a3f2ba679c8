# SPDX-License-Identifier: Apache-2.0
"""What a streamed KV cache is made of: buffers in pool memory, slots, batches seen through."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hifc.errors import HiFCError, NoSpace, WaitTimeout
from hifc.layer_plan import StreamPlan
from hifc.memory import ByteArray
from hifc.namespace import Namespace
from hifc.request import Answer, Op, make_requests
from hifc.ticket import Ticket

# A batch of ours that is not done by then is reported instead of waited for.
BATCH_WAIT_S = 120.0
# Requests that are answered Retry or Pending are asked again for this long.
RETRY_WAIT_S = 30.0
RETRY_DELAY_S = 0.0005

Requests = npt.NDArray[np.void]


class KVBuffer:
    """K and V of one layer in pool memory: `kv` is [2, rows * heads, tokens, dim], in a head-major
    plan [rows * heads, 2, tokens, dim]; `keys` and `values` are [rows, heads, tokens, dim] views
    of it. `offset` is its place in pool 0. memory: a piece of the pool, None takes a new one."""

    __slots__ = ("keys", "kv", "offset", "values")

    def __init__(
        self,
        namespace: Namespace,
        plan: StreamPlan,
        tokens: int,
        dtype: torch.dtype,
        memory: ByteArray | None = None,
    ) -> None:
        shape = plan.shape
        if memory is None:
            memory = namespace.buffer(tokens * shape.layer_token_bytes)
        self.offset = namespace.offset(memory)
        # A tensor that is made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            flat = torch.from_numpy(memory).view(dtype)
            lanes = shape.rows * shape.heads
            order = (lanes, 2) if plan.head_major else (2, lanes)
            self.kv = flat.view(*order, tokens, shape.head_dim)
            sides = self.kv.transpose(0, 1) if plan.head_major else self.kv
            self.keys, self.values = sides.unflatten(1, (shape.rows, shape.heads)).unbind(0)


class Slot:
    """A buffer that layers are streamed through, and the requests that fill it.

    Views of their fields are kept, since this is asked for at every layer of every token.
    """

    __slots__ = (
        "buffer",
        "loads",
        "part",
        "prepared",
        "requests",
        "status",
        "ticket",
        "value_offset",
        "writes",
    )

    def __init__(self, buffer: KVBuffer, loads: Requests) -> None:
        self.buffer = buffer
        self.loads = loads  # one request a block, prepared once
        self.ticket: Ticket | None = None  # of the load under way; None: nothing is on the device
        self.part = -1
        self.writes: list[tuple[Ticket, Requests]] = []
        self.use(loads)

    def use(self, requests: Requests, prepared: int = -1) -> None:
        """Requests of the next load. prepared: how many of `loads` they are."""
        self.requests = requests
        self.prepared = prepared
        self.status = requests["status"]
        self.value_offset = requests["value_offset"]


def settle(namespace: Namespace, ticket: Ticket, requests: Requests, doing: str) -> None:
    """Waits for a batch; every request of it ends OK, or this raises.

    Requests that were answered Retry or Pending are submitted again, for RETRY_WAIT_S at most.
    CorruptionError and DeviceError tell what a request ran into; NoSpace and HiFCError the fix.
    """
    if settle_answers(namespace, ticket, requests, doing):
        _refuse(namespace, requests["status"], doing)


def settle_answers(namespace: Namespace, ticket: Ticket, requests: Requests, doing: str) -> bool:
    """As settle, but answers such as Miss or Exists stand. True if there are any but OK."""
    deadline = time.monotonic() + RETRY_WAIT_S
    await_end(namespace, ticket, doing)
    status = requests["status"]
    if not status.any():
        return False
    ticket.raise_for_errors()
    while (left := np.flatnonzero((status == Answer.RETRY) | (status == Answer.PENDING))).size:
        if time.monotonic() > deadline:
            raise WaitTimeout(
                f"{doing} on {namespace.uri} found no room for {RETRY_WAIT_S:.0f} s: open it "
                "with a larger pool_size, or format it with a larger segment_size (blocks of a "
                "prefill that are not complete keep their segments open)"
            )
        time.sleep(RETRY_DELAY_S)
        again = requests[left]
        ticket = namespace.submit(again)
        await_end(namespace, ticket, doing)
        requests[left] = again
        ticket.raise_for_errors()
    return bool(status.any())


def discard(namespace: Namespace, op: Op, field: str, names: npt.NDArray[Any]) -> None:
    """Deletes keys or aborts handles, whatever is still there of them."""
    deadline = time.monotonic() + RETRY_WAIT_S
    while len(names):
        requests = make_requests(len(names), op)
        requests[field] = names
        await_end(namespace, namespace.submit(requests), op.name.lower())
        names = names[requests["status"] == Answer.RETRY]
        if not len(names) or time.monotonic() > deadline:
            return
        time.sleep(RETRY_DELAY_S)


def await_end(namespace: Namespace, ticket: Ticket, doing: str) -> None:
    """Waits for a batch, however its requests end. WaitTimeout: the device may still write to its
    memory, which must not be used for anything else."""
    if not ticket.wait(BATCH_WAIT_S):
        raise WaitTimeout(
            f"{doing} on {namespace.uri} did not end within {BATCH_WAIT_S:.0f} s; see hifc-admin "
            "doctor"
        )


def _refuse(namespace: Namespace, status: npt.NDArray[np.int32], doing: str) -> None:
    """Raises what an answer that is not OK means."""
    if (status == Answer.NO_SPACE).any():
        raise NoSpace(
            f"{doing} on {namespace.uri}: the device is full of values that may not be evicted; "
            "use a larger device, or close caches that are no longer needed"
        )
    final = status[status != Answer.OK]
    raise HiFCError(
        f"{doing} on {namespace.uri}: {final.size} blocks of this cache were answered "
        f"{Answer(int(final[0])).name}; they were deleted, evicted or damaged (hifc-admin "
        "smart). Call reset() and run the prompt again"
    )
