# SPDX-License-Identifier: Apache-2.0
"""A loop of forwards, stored prefixes and loaded prefixes over one cache, which checks itself.

It goes on after exceptions that come anywhere in it, as those of signal handlers do.
"""

from __future__ import annotations

from typing import Any

import torch

import kv_models as kv
from hifc import InvalidRequest, Namespace

PROMPT = kv.tokens(40)
FORCED = kv.tokens(12, seed=1)  # the tokens after it, one at a time
BLOCK_TOKENS = 16
LAYERS, MAX_TOKENS = 5, 240  # so that layers are streamed


class CacheLoop:
    """`once` runs a prompt and some steps, and raises AssertionError where the logits are not
    bitwise those of transformers' DynamicCache. In between it may be interrupted anywhere.

    namespace: 16 MiB and a pool of 8 MiB are enough.
    """

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.network = kv.model(LAYERS)
        # By the length of the loaded prefix, which stands where a prefill was cut.
        lengths = (0, BLOCK_TOKENS, 2 * BLOCK_TOKENS, PROMPT.shape[1] - 1)
        self._wanted = {length: self._reference(length) for length in lengths}
        self.resets = 0
        self._cache: Any = None
        self._count = 0

    def _reference(self, loaded: int) -> list[torch.Tensor]:
        cache = kv.dynamic(self.network)
        if loaded:
            with torch.inference_mode():
                self.network(PROMPT, cache=cache)
            cache.crop(loaded - PROMPT.shape[1])
        return list(self._logits(cache, loaded))

    def _logits(self, cache: Any, loaded: int) -> Any:
        with torch.inference_mode():
            yield self.network(PROMPT[:, loaded:], cache=cache, logits_to_keep=1).logits
            for step in range(FORCED.shape[1]):
                yield self.network(FORCED[:, step : step + 1], cache=cache).logits

    def once(self) -> None:
        """One round."""
        self._count += 1
        if self._cache is None:
            self._cache = kv.cache_of(
                self.namespace, self.network, MAX_TOKENS, pinned=1, block_tokens=BLOCK_TOKENS
            )
        cache = self._cache
        cache.reset()
        loaded = cache.load_prefix(PROMPT)
        for found, wanted in zip(self._logits(cache, loaded), self._wanted[loaded], strict=True):
            assert torch.equal(found.view(torch.int32), wanted.view(torch.int32)), "logits differ"
        assert cache.save_prefix(PROMPT) == PROMPT.shape[1]
        if self._count % 2:
            cache.reset()  # no cache uses the blocks of the prefix any more
            cache.forget_prefix(PROMPT)
        if self._count % 5 == 0:
            cache.close()
            self._cache = None
        if self._count % 7 == 0:
            self._cache = None  # dropped

    def go_on(self) -> None:
        """After an interruption: the cache as it is goes on exactly, or says what to do."""
        cache = self._cache
        if cache is None or not cache.get_seq_length():
            return
        try:
            cache.save_prefix(PROMPT[:, : min(cache.get_seq_length(), PROMPT.shape[1])])
        except InvalidRequest as error:
            assert "reset()" in str(error)
            self.resets += 1

    def close(self) -> None:
        """Closes the cache. Nothing of it is on the device afterwards but the stored prefix, which
        is deleted."""
        if self._cache is None:
            self._cache = kv.cache_of(
                self.namespace, self.network, MAX_TOKENS, pinned=1, block_tokens=BLOCK_TOKENS
            )
        self._cache.reset()
        for length in (*self._wanted, PROMPT.shape[1]):
            if length:
                self._cache.forget_prefix(PROMPT[:, :length])
        self._cache.close()
