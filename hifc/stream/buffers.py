# SPDX-License-Identifier: Apache-2.0
"""What a streamed KV cache is made of: buffers in pool memory, slots, batches seen through.

An exception of a signal handler (Ctrl-C) may come after any call. What is in flight is therefore
listed before it is submitted, and what a list says is true also where the exception came next.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hifc.errors import HiFCError, NoSpace, WaitTimeout
from hifc.namespace.namespace import Namespace
from hifc.namespace.ticket import Ticket
from hifc.native_lib.memory import ByteArray
from hifc.native_lib.request import Answer, Op, make_requests
from hifc.stream.plan import StreamPlan

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
        "load",
        "loads",
        "part",
        "prepared",
        "requests",
        "status",
        "value_offset",
        "writes",
    )

    def __init__(self, buffer: KVBuffer, loads: Requests) -> None:
        self.buffer = buffer
        self.loads = loads  # one request a block, prepared once
        self.load: Batch | None = None  # that is under way; None: nothing is on the device
        self.part = -1
        self.writes: list[Batch] = []
        self.use(loads)

    def use(self, requests: Requests, prepared: int = -1) -> None:
        """Requests of the next load. prepared: how many of `loads` they are."""
        self.requests = requests
        self.prepared = prepared
        self.status = requests["status"]
        self.value_offset = requests["value_offset"]


class Batch:
    """Requests that were submitted, or are about to be. ticket: None where an exception came before
    it was known; the answers in the requests then tell whether they are in flight."""

    __slots__ = ("requests", "reserves", "ticket")

    def __init__(self, requests: Requests, reserves: bool) -> None:
        self.requests = requests
        self.reserves = reserves
        self.ticket: Ticket | None = None

    def done(self) -> bool:
        """True once nothing of it is in flight."""
        if self.ticket is not None:
            return self.ticket.done()
        return not (self.requests["status"] == Answer.IN_FLIGHT).any()


class InFlight:
    """The batches of one stream that may not have ended, and its open reservations.

    A batch is listed before it is submitted and until it has ended: `await_all` leaves none that
    reads or writes the stream's memory, whatever was interrupted. Used by one thread at a time.
    """

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        # RESERVE requests, some of whose handles may be neither committed nor aborted.
        self.reserved: list[Requests] = []
        self._open: set[Batch] = set()

    def send(self, requests: Requests, *, reserves: bool = False) -> Batch:
        """Submits. reserves: they are RESERVE requests, which `abort` is to undo."""
        batch = Batch(requests, reserves)
        if reserves:
            self.reserved.append(requests)
        self._open.add(batch)
        batch.ticket = self.namespace.submit(requests)
        return batch

    def settle(self, batch: Batch, doing: str) -> None:
        """Waits for a batch; every request of it ends OK, or this raises.

        Requests that were answered Retry or Pending are submitted again, for RETRY_WAIT_S at most.
        CorruptionError and DeviceError tell what a request ran into; NoSpace and HiFCError the fix.
        """
        if self.settle_answers(batch, doing):
            _refuse(self.namespace, batch.requests["status"], doing)

    def settle_answers(self, batch: Batch, doing: str) -> bool:
        """As settle, but answers such as Miss or Exists stand. True if there are any but OK."""
        deadline = time.monotonic() + RETRY_WAIT_S
        requests = batch.requests
        self.await_end(batch, doing)
        status = requests["status"]
        if not status.any():
            return False
        _raise_for_errors(batch)
        while (left := np.flatnonzero((status == Answer.RETRY) | (status == Answer.PENDING))).size:
            if time.monotonic() > deadline:
                raise WaitTimeout(
                    f"{doing} on {self.namespace.uri} found no room for {RETRY_WAIT_S:.0f} s: open "
                    "it with a larger pool_size, or format it with a larger segment_size (blocks "
                    "of a prefill that are not complete keep their segments open)"
                )
            time.sleep(RETRY_DELAY_S)
            again = self.send(requests[left], reserves=batch.reserves)
            self.await_end(again, doing)
            requests[left] = again.requests
            _raise_for_errors(again)
        return bool(status.any())

    def await_end(self, batch: Batch, doing: str) -> None:
        """Waits for a batch, however its requests end. WaitTimeout: the device may still write to
        its memory, which must not be used for anything else."""
        ticket = batch.ticket
        if not (_await_answers(batch) if ticket is None else ticket.wait(BATCH_WAIT_S)):
            raise WaitTimeout(
                f"{doing} on {self.namespace.uri} did not end within {BATCH_WAIT_S:.0f} s; see "
                "hifc-admin doctor"
            )
        self._open.discard(batch)

    def ended(self, batch: Batch) -> None:
        """A batch whose requests all have their answers."""
        self._open.discard(batch)

    def await_all(self) -> None:
        """Waits for every batch, whatever comes of it."""
        for batch in list(self._open):
            self.await_end(batch, "what was in flight")

    def done(self) -> bool:
        """True if no batch is in flight."""
        return all(batch.done() for batch in list(self._open))

    def abort(self) -> None:
        """Gives back every reservation that was not committed. Nothing may be in flight."""
        for requests in list(self.reserved):
            handles = requests["handle"][requests["status"] == Answer.OK]
            self.discard(Op.ABORT, "handle", handles[handles != 0])
        self.reserved.clear()

    def discard(self, op: Op, field: str, names: npt.NDArray[Any]) -> int:
        """Deletes keys or aborts handles, whatever is still there of them. Returns how many a full
        device kept."""
        kept = 0
        deadline = time.monotonic() + RETRY_WAIT_S
        while len(names):
            requests = make_requests(len(names), op)
            requests[field] = names
            self.await_end(self.send(requests), op.name.lower())
            kept += int((requests["status"] == Answer.NO_SPACE).sum())
            names = names[requests["status"] == Answer.RETRY]
            if not len(names) or time.monotonic() > deadline:
                break
            time.sleep(RETRY_DELAY_S)
        return kept


def _await_answers(batch: Batch) -> bool:
    """Waits for a batch whose ticket is not known. False: it did not end."""
    deadline = time.monotonic() + BATCH_WAIT_S
    while not batch.done():
        if time.monotonic() > deadline:
            return False
        time.sleep(RETRY_DELAY_S)
    return True


def _raise_for_errors(batch: Batch) -> None:
    if batch.ticket is not None:
        batch.ticket.raise_for_errors()


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
