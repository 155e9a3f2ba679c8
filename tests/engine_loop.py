# SPDX-License-Identifier: Apache-2.0
"""What an engine has to be like whatever ended its operations: its accounts agree with what they
count, and every key has its value. And a loop of operations that may be interrupted anywhere, also
in this file, and knows what each key may have then.

    loop = EngineLoop(engine)
    while ...:
        with contextlib.suppress(KeyboardInterrupt):
            loop.run(1000)
    loop.check()
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from hifc import HiFC
from hifc.util.units import page_up


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def value(version: int) -> Any:
    """float32, full of the version; most are shorter than a page, some take two or three."""
    return np.full(100 + 700 * (version % 4), version, np.float32)


def version_of(found: Any) -> int | None:
    """Of what was loaded, None for nothing. AssertionError: it is no value of any version."""
    if found is None:
        return None
    version = int(found.flat[0])
    expected = value(version)
    assert found.shape == expected.shape
    assert found.tobytes() == expected.tobytes(), f"a mixture, with parts of {version}"
    return version


def check_accounts(hifc: HiFC) -> None:
    """All that follows from which blocks there are agrees with it."""
    assert key(1 << 100) not in hifc  # an operation, before which all is counted anew
    blocks = list(hifc.blocks)
    resident = [block for block in blocks if block.memory is not None]
    down = hifc.tier.blocks()
    assert {id(block) for block in hifc.blocks.residents()} == {id(block) for block in resident}
    assert hifc.blocks.resident_count == len(resident)
    assert hifc.blocks.resident_bytes == sum(block.held_bytes for block in resident)
    assert hifc.metrics["resident_bytes"] == hifc.blocks.resident_bytes
    assert hifc.metrics["blocks"] == len(blocks)
    assert hifc.tier.used_bytes == sum(block.size_bytes for block in down)
    assert all(hifc.blocks.get(block.key) is block for block in down)
    assert not {block.key for block in down} & {block.key for block in resident}
    sequences = {block.sequence for block in blocks} - {None}
    assert hifc.blocks._sequences.keys() == sequences
    for sequence in sequences:
        found = {block.key for block in hifc.blocks.sequence(sequence)}
        assert found == {block.key for block in blocks if block.sequence == sequence}
    reuse = {block.key for block in blocks if block.cls == "reuse"}
    on_flash_alone = reuse - {block.key for block in (*resident, *down)}
    assert hifc._absent.keys() == on_flash_alone
    assert hifc._prefetched <= {block.key for block in resident}
    for block in blocks:
        assert block.resident or block.key in hifc.tier or block.on_flash is not False
    _check_policy(hifc)


def _check_policy(hifc: HiFC) -> None:
    policy, blocks = hifc.policy, list(hifc.blocks)
    slots = [block.slot for block in blocks]
    assert sorted([*slots, *policy._free]) == list(range(policy._count))
    for block in blocks:
        assert policy._depth[block.slot] == block.depth
        assert policy._head[block.slot] == block.head
        chain = -1 if block.sequence is None else policy._chains[block.sequence]
        assert policy._chain[block.slot] == chain
    assert sum(policy._chain_users.values()) == sum(block.sequence is not None for block in blocks)
    assert policy._chains.keys() == {block.sequence for block in blocks} - {None}


def pool_bytes(hifc: HiFC) -> int:
    """What of the pool is taken by anything but the blocks in it, and what prefetches take."""
    hifc.namespace.sync()
    hifc.namespace.drain()
    blocks = sum(page_up(block.size_bytes) for block in hifc.blocks if block.memory is not None)
    coming = hifc._pending_bytes + hifc.ahead.arena_bytes
    handle = hifc.namespace._handle
    handle.collect()
    return int(handle.lib.hifc_pool_lent(handle.pointer)) - blocks - coming


class EngineLoop:
    """Operations on `keys` keys, in an order that the seed decides."""

    def __init__(self, hifc: HiFC, keys: int = 24, seed: int = 0) -> None:
        self.hifc = hifc
        self.operations = 0  # that came to their end
        self._random = random.Random(seed)
        self._version = 0
        # The versions that each key may have. Each change is one store, before the operation with
        # what it may bring, after it with what it has brought.
        self._allowed: dict[int, tuple[int | None, ...]] = dict.fromkeys(range(keys), (None,))

    def run(self, count: int) -> None:
        """So many operations. May be interrupted, and called again."""
        for _ in range(count):
            self._step()
            self.operations += 1

    def check(self) -> None:
        """The accounts, and every value."""
        check_accounts(self.hifc)
        for number in self._allowed:
            self.load(number)
        check_accounts(self.hifc)

    def store(self, number: int) -> None:
        """A new version under the key."""
        self._version = version = self._version + 1
        self._allowed[number] = (*self._allowed[number], version)
        cls = "reuse" if number % 3 == 0 else "swap"
        sequence = number % 4 if number % 5 else None
        head = number % 2
        self.hifc.store(key(number), value(version), cls=cls, sequence=sequence, head=head)
        self._allowed[number] = (version,)

    def load(self, number: int) -> None:
        """One of the versions that it may have, and that one from now on."""
        version = version_of(self.hifc.load(key(number)))
        assert version in self._allowed[number], f"key {number}: {version}"
        self._allowed[number] = (version,)

    def delete(self, number: int) -> None:
        """No version is left."""
        self._allowed[number] = (*self._allowed[number], None)
        self.hifc.delete(key(number))
        self._allowed[number] = (None,)

    def observe(self, number: int) -> None:
        """Attention to the key and the next one."""
        mass = np.zeros((2, len(self._allowed)), np.float32)
        mass[:, [number, (number + 1) % len(self._allowed)]] = 1
        self.hifc.observe_attention(mass, [key(other) for other in self._allowed])

    def _step(self) -> None:
        number = int(self._random.random() * len(self._allowed))
        choice = self._random.random()
        if choice < 0.4:
            self.store(number)
        elif choice < 0.75:
            self.load(number)
        elif choice < 0.82:
            self.delete(number)
        elif choice < 0.86:
            assert (key(number) in self.hifc) in [v is not None for v in self._allowed[number]]
        elif choice < 0.9:
            self.hifc.prefetch([key(number), key(number + 1)])
        elif choice < 0.94 and self.hifc.namespace.reactor:
            self.observe(number)
        elif choice < 0.97:
            self.hifc.sync()
        else:
            self.hifc.offload()
