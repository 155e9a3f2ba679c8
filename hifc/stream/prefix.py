# SPDX-License-Identifier: Apache-2.0
"""Prefixes of a streamed cache, stored under their token ids and found again.

A full block is stored under its key in the chain of token ids; the partial last block is an entry
of its own, padded to whole pages (with later tokens of the sequence or zeros, which nobody reads).
Stored values hold all layers: [layer][K|V][head][token][dim], each (layer, K|V, head) a part.

A loaded prefix is not copied: streamed layers go on being read from the stored entries, under a
lease, and only pinned layers and the tails are loaded. What is there is decided before anything is
used: a block that is missing or damaged then shortens the prefix.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from hifc.blocks.keys import BlockKeys
from hifc.errors import InvalidRequest, NoSpace, WaitTimeout
from hifc.namespace.reservation import Lease
from hifc.native_lib.request import Answer, KeyArray, Op, make_requests
from hifc.stream.buffers import Requests
from hifc.stream.edits import KVStream
from hifc.stream.layers import LEASE_S
from hifc.stream.plan import round_up
from hifc.stream.recompute import Watch

_LOG = logging.getLogger("hifc")

# Blocks that are reserved at a time: a reservation holds a page of the pool and has a deadline.
SAVE_BLOCKS_MAX = 256

Tokens = npt.NDArray[np.int64]


def save(stream: KVStream, tokens: Tokens) -> int:
    """Stores the KV of tokens, the first ones of the sequence, and makes it durable.

    Returns how many tokens can be found again: fewer where the namespace declined to write more
    (admission, no space). What is stored already is not written again. An exception that comes
    meanwhile leaves each block stored or absent, and the stream as it was.
    """
    _check(stream, tokens)
    stream.check_whole()
    if len(tokens) > stream.lengths[0]:
        raise InvalidRequest(
            f"save_prefix: {len(tokens)} tokens were given, the cache holds {stream.lengths[0]}"
        )
    namespace = stream.namespace
    keys = stream.scheme.keys(tokens)
    names = keys.array()
    stream.finish_commit()  # so that all reservations that are open are those of the prefix
    for first in range(0, len(names), SAVE_BLOCKS_MAX):
        end = min(first + SAVE_BLOCKS_MAX, len(names))
        try:
            _save_blocks(stream, keys, first, end)
        except WaitTimeout:  # the next operation waits again
            raise
        except BaseException:  # what was reserved would keep keys and segments for minutes
            stream.recover()
            raise
    namespace.sync()
    found = namespace.longest_prefix(names)
    count = len(tokens) if found == len(names) else found * stream.plan.block_tokens
    _LOG.info("prefix saved on %s: %d of %d tokens", namespace.uri, count, len(tokens))
    return count


def load(stream: KVStream, tokens: Tokens, watch: Watch) -> int:
    """Makes the longest stored prefix of tokens the beginning of an empty stream, if watch decides
    that loading it is faster than computing it.

    Returns its length, at most len(tokens) - 1: the model must see one token at least, or
    generate would run the whole prompt again. 0: nothing is stored, or it is to be computed.
    """
    _check(stream, tokens)
    stream.check_empty()
    uri = stream.namespace.uri
    limit = min(len(tokens) - 1, stream.plan.max_tokens)
    keys = stream.scheme.keys(tokens)
    blocks = stream.namespace.longest_prefix(keys.full)
    partial = _find_partial(stream, tokens, keys, blocks)
    while True:
        found = _Found(stream, keys.full, blocks, partial, limit)
        if found.tokens == 0:
            _LOG.info("prefix of %d tokens: none is stored on %s", len(tokens), uri)
            return 0
        wanted = watch.decide(found.tokens, len(tokens))
        _LOG.info("prefix on %s: %s", uri, watch.decision)
        if not wanted:
            return 0
        missing = found.load(stream)
        if missing is None:
            watch.loaded(found.tokens)
            _LOG.info("prefix loaded from %s: %d of %d tokens", uri, found.tokens, len(tokens))
            return found.tokens
        _LOG.info("prefix on %s: block %d is gone, trying a shorter one", uri, missing)
        if missing < blocks:
            blocks, partial = missing, None
        else:
            partial = None


def forget(stream: KVStream, tokens: Tokens) -> None:
    """Deletes what is stored of tokens: their full blocks and the partial one after them.

    Raises unless all of it is gone. NoSpace: the device has no room to note that they are.
    """
    _check(stream, tokens)
    names = stream.scheme.keys(tokens).array()
    left = stream.flights.discard(Op.DELETE, "key", names)
    if left:
        raise NoSpace(
            f"forget_prefix on {stream.namespace.uri}: {left} of {len(names)} blocks are still "
            "there, as nothing that may be evicted is left; delete swap entries, release leases or "
            "use a larger device"
        )


def _check(stream: KVStream, tokens: Tokens) -> None:
    if stream.plan.shape.rows != 1:
        raise InvalidRequest(
            f"a prefix has one row, this cache has {stream.plan.shape.rows}: save and load it with "
            "batch size 1 and without beams"
        )
    if len(tokens) == 0:
        raise InvalidRequest("a prefix has one token or more")


# ---- saving


def _save_blocks(stream: KVStream, keys: BlockKeys, first: int, end: int) -> None:
    """Stores entries [first, end) of keys.array(), the last of which may be the partial one."""
    namespace = stream.namespace
    names = keys.array()[first:end]
    reserve = make_requests(len(names), Op.RESERVE)
    reserve["key"] = names
    shape = stream.plan.shape
    reserve["length"] = shape.layers * stream.plan.share_bytes
    if end > len(keys.full):
        padded = round_up(keys.partial_tokens, shape.page_tokens)
        reserve["length"][-1] = padded * shape.token_bytes
    reserve["part_count"] = shape.layers * stream.plan.layer_parts
    missing = np.flatnonzero(namespace.lookup(names) != Answer.OK)
    if not missing.size:
        return
    wanted = reserve[missing]
    flights = stream.flights
    flights.settle_answers(flights.send(wanted, reserves=True), "reserve")
    reserve["status"] = Answer.EXISTS
    reserve[missing] = wanted
    taken = np.flatnonzero(reserve["status"] == Answer.OK)
    if len(taken):
        _write_layers(stream, reserve, taken, first, keys)
        commit = make_requests(len(taken), Op.COMMIT)
        commit["handle"] = reserve["handle"][taken]
        if flights.settle_answers(flights.send(commit), "commit"):
            flights.abort()
    flights.reserved.clear()


def _write_layers(
    stream: KVStream, reserve: Requests, taken: npt.NDArray[np.intp], first: int, keys: BlockKeys
) -> None:
    """Writes every layer of the reserved blocks: one read and one write of each layer."""
    plan, shape = stream.plan, stream.plan.shape
    length = stream.lengths[0]
    last = len(keys.full)
    padded = round_up(keys.partial_tokens, shape.page_tokens)
    pad = last * plan.block_tokens + padded
    for layer, buffer, writes in stream.each_layer():
        requests = stream.block_requests(
            Op.WRITE, buffer.offset, plan.capacity_tokens, first, first + len(reserve)
        )
        requests["handle"] = reserve["handle"]
        requests["value_offset"] = layer * plan.share_bytes
        if first + len(reserve) > last:
            requests["length"][-1] = padded * shape.layer_token_bytes
            requests["piece_bytes"][-1] = padded * shape.head_token_bytes
            requests["value_offset"][-1] = layer * padded * shape.layer_token_bytes
            if pad > length:
                buffer.kv.narrow(2, length, pad - length).zero_()
        requests = requests[taken]
        batch = stream.flights.send(requests)
        if (requests["status"] == Answer.RETRY).any():
            stream.flights.settle(batch, "write")
        writes.append(batch)
        stream.written_bytes += int(requests["length"].sum())


# ---- loading


def _find_partial(
    stream: KVStream, tokens: Tokens, keys: BlockKeys, blocks: int
) -> tuple[bytes, int] | None:
    """The longest stored partial block after the full ones: its key and length in tokens."""
    block = stream.plan.block_tokens
    parent = keys.full[blocks - 1].tobytes() if blocks else stream.scheme.root
    rest = tokens[blocks * block : (blocks + 1) * block]
    lengths = range(min(len(rest), block - 1), 0, -1)
    names = [stream.scheme.child(parent, rest[:length]) for length in lengths]
    if not names:
        return None
    array = np.frombuffer(b"".join(names), dtype=np.uint8).reshape(len(names), -1)
    there = np.flatnonzero(stream.namespace.lookup(array) == Answer.OK)
    if not there.size:
        return None
    return names[int(there[0])], lengths[int(there[0])]


class _Found:
    """A prefix that seems to be there: full blocks, and the entry whose beginning is the tail."""

    def __init__(
        self,
        stream: KVStream,
        full: KeyArray,
        blocks: int,
        partial: tuple[bytes, int] | None,
        limit: int,
    ) -> None:
        block = stream.plan.block_tokens
        end = blocks * block + (partial[1] if partial else 0)
        self.tokens = min(end, limit)
        self.blocks, rest = divmod(self.tokens, block)
        self.names = full[: self.blocks]
        self.entry: KeyArray | None = None  # of the tail
        self.entry_tokens = 0
        if rest and self.blocks < blocks:
            self.entry, self.entry_tokens = full[self.blocks], block
        elif rest and partial:
            self.entry = np.frombuffer(partial[0], dtype=np.uint8)
            self.entry_tokens = round_up(partial[1], stream.plan.shape.page_tokens)

    def load(self, stream: KVStream) -> int | None:
        """Loads pinned layers and tails. None, or the number of the block that is not there."""
        namespace = stream.namespace
        names = self.names
        if self.entry is not None:
            names = np.concatenate([names, self.entry[None]])
        stream.expect_prefix()
        stream.lease = lease = namespace.lease(names, LEASE_S)
        try:
            missing = self._read(stream, lease)
        except BaseException:
            stream.end_lease()
            raise
        if missing is not None:
            stream.end_lease()
            return missing
        namespace.touch(names)
        stream.adopt(self.names, self.tokens)
        return None

    def _read(self, stream: KVStream, lease: Lease) -> int | None:
        gone = np.flatnonzero(lease.answers != Answer.OK)
        if gone.size:
            return int(gone[0])
        parts = list(self._requests(stream))
        if not parts:
            return None
        requests = np.concatenate(parts)
        batch = stream.flights.send(requests)
        stream.read_bytes += int(requests["length"].sum())
        if not stream.flights.settle_answers(batch, "load of a prefix"):
            return None
        return int(requests["user"][requests["status"] != Answer.OK].min())

    def _requests(self, stream: KVStream) -> Iterator[Requests]:
        """Reads of pinned layers and tails; `user` is the number of the block."""
        plan, shape = stream.plan, stream.plan.shape
        for layer, buffer in stream.pinned.items():
            if self.blocks:
                requests = stream.block_requests(
                    Op.GET, buffer.offset, plan.capacity_tokens, 0, self.blocks
                )
                requests["key"] = self.names
                requests["value_offset"] = layer * plan.share_bytes
                requests["user"] = np.arange(self.blocks)
                yield requests
        if self.entry is None:
            return
        tail = make_requests(shape.layers, Op.GET)
        tail["key"] = self.entry
        tail["length"] = self.entry_tokens * shape.layer_token_bytes
        tail["value_offset"] = np.arange(shape.layers) * tail["length"]
        tail["piece_bytes"] = self.entry_tokens * shape.head_token_bytes
        tail["user"] = self.blocks
        tail["piece_stride"] = plan.capacity_tokens * shape.head_token_bytes
        tail["piece_stride"][list(stream.streamed)] = plan.piece_bytes
        for layer, buffer in stream.pinned.items():
            tail["buffer_offset"][layer] = buffer.offset + self.blocks * plan.piece_bytes
        for layer, buffer in zip(stream.streamed, stream.tails, strict=True):
            tail["buffer_offset"][layer] = buffer.offset
        yield tail
