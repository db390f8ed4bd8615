"""One face for the indexes that are compared. Keys are made outside what is timed.

A key is what the index's own callers would hand it: int32 bytes here, `RadixKey` over an int64
array in SGLang, a list of ints in vLLM, which hashes it as part of a match.
"""

from array import array
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

from radixkv.core.cache import Cache
from radixkv.core.prefix_index import PrefixIndex
from radixkv.core.results import Acquired, AcquireRequest, CacheConfig, ReleaseReason

BLOCK_SIZE = 16
NAMESPACE = b"bench"
Tokens = np.ndarray


class Index(Protocol):
    """A prefix index with blocks of BLOCK_SIZE tokens."""

    def key(self, tokens: Tokens) -> Any:
        """The tokens as this index takes them."""

    def match(self, key: Any) -> int:
        """Look a prompt up; returns the tokens that match."""

    def insert(self, key: Any) -> None:
        """Cache a whole sequence."""

    def evict(self, num_blocks: int) -> None:
        """Make room."""


class Ours:
    """The core's public operations, with everything they do: leases, books, miss reasons."""

    def __init__(self, num_blocks: int) -> None:
        self.cache = Cache(CacheConfig(num_blocks, BLOCK_SIZE, max_reserve_blocks=num_blocks))
        self.cache.open_session(1)

    def key(self, tokens: Tokens) -> bytes:
        return tokens.astype("<i4").tobytes()

    def match(self, key: bytes) -> int:
        return self.cache.lookup(NAMESPACE, key).cached_tokens

    def insert(self, key: bytes) -> None:
        self.turn(key, key)

    def turn(self, prompt: bytes, whole: bytes) -> None:
        """Acquire a prompt, commit it with what was generated, release."""
        extra = len(whole) // (4 * BLOCK_SIZE) - -(-len(prompt) // (4 * BLOCK_SIZE))
        got = self.cache.acquire(1, 1, AcquireRequest(prompt, NAMESPACE, extra_blocks=extra), 0)
        assert isinstance(got, Acquired)
        self.cache.commit(1, 1, len(whole) // 4, whole[len(prompt) :], ())
        self.cache.release(1, 1, ReleaseReason.FINISHED, 0)

    def pair(self, prompt: bytes) -> None:
        """Acquire and Release of a prompt that is cached."""
        self.cache.acquire(1, 1, AcquireRequest(prompt, NAMESPACE), 0)
        self.cache.release(1, 1, ReleaseReason.FINISHED, 0)

    def evict(self, num_blocks: int) -> None:
        self.cache.refill(1, num_blocks)


class OurTree:
    """The prefix index alone, as the peers' modules are: no leases, no sessions."""

    def __init__(self, num_blocks: int) -> None:
        self._index = PrefixIndex(CacheConfig(num_blocks, BLOCK_SIZE))

    def key(self, tokens: Tokens) -> bytes:
        return tokens.astype("<i4").tobytes()

    def turn(self, prompt: bytes, whole: bytes) -> None:
        """Match and lock a prompt, insert it with what was generated, unlock."""
        index = self._index
        tree = index.tree(NAMESPACE)
        block = tree.block_bytes
        match = tree.match(prompt, (len(prompt) - 4) // block * block)
        start = index.settle(match)
        index.lock(start)
        new = whole[match.length :]
        ids = self._index.gpu.pool.take(len(new) // block)
        end, _ = index.insert(start, new, ids, own_end=start.locks == 1)
        if end is not start:
            index.lock(end)
            index.unlock(start)
        index.touch(end)
        index.unlock(end)
        index.join_up(end)


class SGLang:
    """SGLang's tree, in Python or Rust: match and insert, without its allocator and its locks."""

    def __init__(self, peer: SimpleNamespace, rust: bool) -> None:
        import torch

        self._peer, self._torch, self._rust = peer, torch, rust
        self.tree = peer.rust(BLOCK_SIZE) if rust else peer.python(BLOCK_SIZE)

    def key(self, tokens: Tokens) -> Any:
        values = self._torch.arange(len(tokens), dtype=self._torch.int64)
        return self._peer.Key(array("q", tokens.tolist())), values

    def match(self, key: Any) -> int:
        return self.tree.match_prefix(self._peer.Match(key=key[0])).device_prefix_len

    def insert(self, key: Any) -> None:
        params = self._peer.Insert(key=key[0], value=key[1])
        if not self._rust:
            self.tree.insert(params)
            return
        step = self.tree.begin_insert(params)
        while step.result is None:
            step = self.tree.resume_insert()
        self.tree.end_insert()

    def turn(self, prompt: Any, whole: Any) -> None:
        """Match a prompt, then insert it with what was generated."""
        self.match(prompt)
        self.insert(whole)


class VLLM:
    """vLLM's block pool with chained sha256 block hashes."""

    def __init__(self, peer: SimpleNamespace, num_blocks: int) -> None:
        self._peer = peer
        self.pool = peer.BlockPool(num_blocks + 1, True, BLOCK_SIZE)

    def key(self, tokens: Tokens) -> list[int]:
        return tokens.tolist()

    def _hashes(self, key: list[int]) -> list[bytes]:
        hashes: list[bytes] = []
        parent = None
        for start in range(0, len(key) - BLOCK_SIZE + 1, BLOCK_SIZE):
            block = key[start : start + BLOCK_SIZE]
            parent = self._peer.hash_block_tokens(self._peer.sha256, parent, block, None)
            hashes.append(parent)
        return hashes

    def _cached(self, hashes: list[bytes]) -> list[Any]:
        found: list[Any] = []
        for block_hash in hashes:
            blocks = self.pool.get_cached_block(block_hash, [0])
            if not blocks:
                break
            found += blocks
        return found

    def match(self, key: list[int]) -> int:
        return len(self._cached(self._hashes(key))) * BLOCK_SIZE

    def insert(self, key: list[int]) -> None:
        hashes = self._hashes(key)
        blocks = self._cached(hashes)
        self.pool.touch(blocks)
        old = len(blocks)
        blocks += self.pool.get_new_blocks(len(hashes) - old)
        request = SimpleNamespace(block_hashes=hashes)
        self.pool.cache_full_blocks(request, blocks, old, len(hashes), BLOCK_SIZE, 0)
        self.pool.free_blocks(reversed(blocks))

    def evict(self, num_blocks: int) -> None:
        self.pool.get_new_blocks(num_blocks)
