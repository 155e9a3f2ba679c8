# SPDX-License-Identifier: Apache-2.0
"""KV blocks: what names them, what they are, and the table of those that a process holds.

Two blocks that differ in anything that changes their bytes or who may see them never share a key:
tenant, model, revision, LoRA, position encoding, dtype, quantisation, layout, block length, KV
group, rank, the tokens before and in them, the images among those tokens.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from hifc.errors import InvalidRequest
from hifc.native_lib.request import KeyArray, key_bytes
from hifc.util.checking import items, whole
from hifc.util.units import page_up

_SALT_MAX_BYTES = 64
_DIGEST_BYTES = 16
# BLAKE2b personalisation: keys for reuse and for swap live in different worlds.
_REUSE = b"hifc.reuse.1"
_SWAP = b"hifc.swap.1"


def canonical(value: object) -> bytes:
    """An encoding in which different values never look alike: tag, length, content.

    Takes None, bool, int, float, str, bytes, and lists and mappings of these.
    """
    match value:
        case None:
            return b"n"
        case bool():
            return b"t" if value else b"f"
        case int():
            body = str(value).encode()
            tag = b"i"
        case float():
            body = struct.pack("<d", value)
            tag = b"d"
        case str():
            body = value.encode("utf-8", "surrogatepass")
            tag = b"s"
        case bytes():
            body = value
            tag = b"b"
        case Mapping():
            pairs = sorted((canonical(key), canonical(item)) for key, item in value.items())
            body = b"".join(key + item for key, item in pairs)
            tag = b"m"
        case list() | tuple():
            body = b"".join(canonical(item) for item in value)
            tag = b"l"
        case _:
            raise InvalidRequest(
                f"a key cannot be made of {type(value).__name__}: use text, numbers, bytes, or "
                "lists and mappings of these"
            )
    return tag + struct.pack("<Q", len(body)) + body


class BlockKeys(NamedTuple):
    """Keys of a token sequence: its full blocks, and the partial last one if there is one."""

    full: KeyArray  # uint8 of shape (n, 16)
    partial: bytes | None
    partial_tokens: int

    def array(self) -> KeyArray:
        """All keys, shape (n, 16) or (n + 1, 16): look-up tries the partial one last."""
        if self.partial is None:
            return self.full
        last = np.frombuffer(self.partial, dtype=np.uint8).reshape(1, _DIGEST_BYTES)
        return np.concatenate([self.full, last])


@dataclass(frozen=True)
class KeyScheme:
    """All that blocks of one cache have in common. Keys are BLAKE2b-128, keyed by salt."""

    model: str
    revision: str = ""
    lora: str = ""
    position: Mapping[str, Any] | str = ""  # parameters of the position encoding, RoPE or other
    dtype: str = "float16"
    quantization: str = ""
    layout: str = "layer-major"
    block_tokens: int = 256
    kv_group: int = 0
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    salt: bytes = b""  # of the tenant, at most 64 bytes; keep it secret

    def __post_init__(self) -> None:
        if not isinstance(self.salt, bytes):
            raise InvalidRequest(f"salt is bytes, not {type(self.salt).__name__}")
        if len(self.salt) > _SALT_MAX_BYTES:
            raise InvalidRequest(f"salt has {len(self.salt)} bytes, at most {_SALT_MAX_BYTES} fit")
        object.__setattr__(self, "block_tokens", whole("block_tokens", self.block_tokens, 1))
        for name in ("kv_group", "tp_rank", "tp_size", "pp_rank", "pp_size"):
            object.__setattr__(self, name, whole(name, getattr(self, name), 0))
        for rank, size, name in (
            (self.tp_rank, self.tp_size, "tp"),
            (self.pp_rank, self.pp_size, "pp"),
        ):
            if not 0 <= rank < size:
                raise InvalidRequest(
                    f"{name}_rank is {rank}: use 0 to {name}_size - 1 = {size - 1}"
                )
        object.__setattr__(self, "_root", self._digest(_REUSE, canonical(self._identity())))

    def __hash__(self) -> int:
        return hash(self.root)

    def _identity(self) -> dict[str, Any]:
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "salt"
        }

    def _digest(self, person: bytes, *pieces: bytes) -> bytes:
        state = hashlib.blake2b(digest_size=_DIGEST_BYTES, key=self.salt, person=person)
        for piece in pieces:
            state.update(piece)
        return state.digest()

    @property
    def root(self) -> bytes:
        """The parent of every first block."""
        root: bytes = self.__dict__["_root"]
        return root

    def child(
        self, parent: bytes, tokens: npt.ArrayLike, images: Sequence[tuple[int, bytes]] = ()
    ) -> bytes:
        """Key of the block with these tokens after the block with key parent.

        images: (position within the block, content hash) of each image that begins in it, since
        the placeholder ids of all images are equal.
        """
        ids, parent = _token_bytes(tokens), key_bytes(parent)
        if len(ids) // 8 > self.block_tokens:
            raise InvalidRequest(
                f"{len(ids) // 8} tokens do not fit a block of {self.block_tokens} tokens"
            )
        extra = canonical([[at, content] for at, content in _images(images)])
        return self._digest(_REUSE, parent, struct.pack("<Q", len(ids)), ids, extra)

    def keys(
        self,
        tokens: npt.ArrayLike,
        images: Sequence[tuple[int, bytes]] = (),
        parent: bytes | None = None,
    ) -> BlockKeys:
        """Keys of all blocks of a sequence.

        tokens: integers of shape (n,); images: (position in tokens, content hash) each; parent:
        key of the block before the first token, for a sequence whose beginning is known already.
        """
        ids = np.asarray(tokens)
        _token_bytes(ids[:0] if ids.ndim else ids)
        length = self.block_tokens
        count, rest = divmod(len(ids), length)
        digest = self.root if parent is None else key_bytes(parent)
        found: list[bytes] = []
        by_block: dict[int, list[tuple[int, bytes]]] = {}
        for at, content in _images(images):
            if not 0 <= at < len(ids):
                raise InvalidRequest(f"an image at token {at} is outside of {len(ids)} tokens")
            by_block.setdefault(at // length, []).append((at % length, content))
        for number in range(count):
            chunk = ids[number * length : (number + 1) * length]
            digest = self.child(digest, chunk, by_block.get(number, ()))
            found.append(digest)
        full = np.frombuffer(b"".join(found), dtype=np.uint8).reshape(-1, _DIGEST_BYTES)
        partial = (
            self.child(digest, ids[count * length :], by_block.get(count, ())) if rest else None
        )
        return BlockKeys(full, partial, rest)

    def swap_key(self, sequence: str | int | bytes, block: int) -> bytes:
        """Key of block number `block` of a sequence that is swapped out, by its id."""
        return self._digest(
            _SWAP, canonical([sequence, block, self.tp_rank, self.pp_rank, self.kv_group])
        )


def _images(images: Sequence[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """Each as a number and bytes. bytes(7) would be seven zeros, whatever 7 was the hash of."""
    found: list[tuple[int, bytes]] = []
    for image in items("images", images):
        if not (isinstance(image, tuple | list) and len(image) == 2):
            raise InvalidRequest("an image is (position of its first token, hash of its content)")
        at, content = image
        if not isinstance(content, bytes | bytearray | memoryview):
            raise InvalidRequest(
                f"the content hash of an image is bytes, not {type(content).__name__}"
            )
        found.append((whole("position of an image", at, 0), bytes(content)))
    return found


def _token_bytes(tokens: npt.ArrayLike) -> bytes:
    ids = np.asarray(tokens)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise InvalidRequest(
            f"tokens are integers of shape (n,), not {ids.dtype} of shape {ids.shape}"
        )
    return ids.astype("<i8").tobytes()


@dataclass(slots=True)
class KVBlock:
    """One block of KV that this process knows: what a policy decides about.

    A policy of your own reads these fields. HiFCPolicy, which it derives from, keeps slot, weight,
    access_count, last_access and hot up to date.

    key: the 16 bytes that it is stored under. size_bytes: its length as stored, compressed where
    compression is on. sequence, depth, head: where it belongs, as given to HiFC.store: the name of
    its sequence or None, its place in the sequence's chain (0 is the first), its attention head
    (-1: all heads). cls: "reuse" or "swap".
    slot: its index into the policy's arrays, -1 while it has none. weight: its decayed access
    frequency, set just before should_swap_out is asked. access_count: accesses so far.
    last_access: time of the last one, in seconds of the policy's clock. hot: the classifier counts
    it as hot, set just before should_swap_out is asked.
    resident: its bytes are in memory. on_flash: its bytes are on flash. Both may hold. memory: the
    pool's array of a resident block, None otherwise. held_bytes: memory it takes while resident.
    """

    key: bytes
    size_bytes: int = 0  # as stored
    sequence: str | int | None = None
    depth: int = 0  # place in its chain; 0 is the head
    head: int = -1  # attention head, or KV group, that it belongs to; -1: all
    cls: Literal["reuse", "swap"] = "swap"
    slot: int = -1  # of the policy's arrays
    weight: float = 0.0  # decayed frequency, set just before a policy is asked
    access_count: int = 0
    last_access: float = 0.0  # by the policy's clock, seconds
    # Its bytes are on flash; None: first it has to be seen what is there under its key.
    on_flash: bool | None = False
    hot: bool = True  # by the classifier's split, set just before a policy is asked
    memory: Any = field(default=None, repr=False, compare=False)  # pool memory of a resident block

    @property
    def resident(self) -> bool:
        """Its bytes are in the pool."""
        return self.memory is not None

    @property
    def held_bytes(self) -> int:
        """Memory that it takes while resident: whole pages."""
        return page_up(self.size_bytes)


class BlockTable:
    """The blocks that a process knows, by key and by sequence. Not thread-safe.

    on_change: told of every block that comes into memory or leaves it. What is true is which block
    a key names, and the memory of each block; all else follows from it, see `recount`.
    """

    def __init__(self, on_change: Callable[[KVBlock], None] | None = None) -> None:
        self._on_change = on_change
        self._blocks: dict[bytes, KVBlock] = {}
        self._sequences: dict[str | int, dict[bytes, KVBlock]] = {}
        self._resident: dict[bytes, KVBlock] = {}
        self.resident_bytes = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def __iter__(self) -> Iterator[KVBlock]:
        return iter(self._blocks.values())

    def get(self, key: bytes) -> KVBlock | None:
        """The block, or None."""
        return self._blocks.get(key)

    def add(self, block: KVBlock) -> None:
        """A key that is there is refused: remove it first."""
        if block.key in self._blocks:
            raise InvalidRequest(f"block {block.key.hex()} is in the table already")
        self._blocks[block.key] = block
        self.count(block)

    def name(self, key: bytes, block: KVBlock | None) -> None:
        """What the key names from now on, None for nothing, and no more than that: then `drop` what
        it named before, and `count` the block."""
        if block is None:
            self._blocks.pop(key, None)
        else:
            self._blocks[key] = block

    def count(self, block: KVBlock) -> None:
        """Its key names it by now."""
        self._count(block)
        self._tell(block)

    def remove(self, key: bytes) -> KVBlock | None:
        """Forgets the block; None if it was not there."""
        block = self._blocks.get(key)
        if block is not None:
            self.drop(block)
        return block

    def drop(self, block: KVBlock) -> None:
        """Forgets this very block, whether or not its key names another one by now."""
        if self._blocks.get(block.key) is block:
            del self._blocks[block.key]
        self._count_memory(block, False)
        siblings = {} if block.sequence is None else self._sequences.get(block.sequence, {})
        if siblings.get(block.key) is block:
            del siblings[block.key]
            if not siblings:
                del self._sequences[block.sequence]  # type: ignore[arg-type]
        self._tell(block)

    def set_resident(self, block: KVBlock, memory: Any) -> None:
        """memory: what holds its bytes, or None when they left memory."""
        block.memory = memory
        self._count_memory(block, block.resident)
        self._tell(block)

    def recount(self) -> None:
        """All that follows from what is true, anew: an exception may have come in between."""
        self._sequences, self._resident, self.resident_bytes = {}, {}, 0
        for block in self._blocks.values():
            self._count(block)

    def _count(self, block: KVBlock) -> None:
        if block.sequence is not None:
            self._sequences.setdefault(block.sequence, {})[block.key] = block
        self._count_memory(block, block.resident)

    def _count_memory(self, block: KVBlock, resident: bool) -> None:
        if resident == (self._resident.get(block.key) is block):
            return
        if resident:
            self._resident[block.key] = block
            self.resident_bytes += block.held_bytes
        else:
            del self._resident[block.key]
            self.resident_bytes -= block.held_bytes

    def _tell(self, block: KVBlock) -> None:
        if self._on_change is not None:
            self._on_change(block)

    def sequence(self, sequence: str | int) -> list[KVBlock]:
        """The blocks of a sequence by depth."""
        blocks = self._sequences.get(sequence, {}).values()
        return sorted(blocks, key=lambda block: block.depth)

    @property
    def resident_count(self) -> int:
        """How many have their bytes in memory."""
        return len(self._resident)

    def residents(self) -> list[KVBlock]:
        """Blocks whose bytes are in memory."""
        return list(self._resident.values())
