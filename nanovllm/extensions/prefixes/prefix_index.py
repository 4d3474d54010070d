"""Finds the block that has the longest beginning in common with some tokens.

Knows hashes, tokens and numbers of blocks; nothing about who owns them. The idea: blocks that follow the same
tokens are kept sorted by their own, so the one that has most in common with some tokens is a neighbour of the
place where these would stand. Finding it takes a binary search, however many blocks there are. Tokens are
sorted as bytes, which are compared in C: in any order of bytes equal beginnings are neighbours.
"""

import struct
from bisect import bisect_left, insort
from collections.abc import Hashable

import numpy as np

TOKEN_BYTES = 8


def pack(token_ids: list[int]) -> bytes:
    """The ids as little-endian int64."""
    return struct.pack(f"<{len(token_ids)}q", *token_ids)


class PrefixIndex:
    """Has the packed tokens of blocks, and what stands for all tokens before them (`parent`)."""

    def __init__(self) -> None:
        # By block id: parent and tokens.
        self.blocks: dict[int, tuple[Hashable, bytes]] = {}
        # By parent: (tokens, block id), sorted.
        self._children: dict[Hashable, list[tuple[bytes, int]]] = {}

    def add(self, block_id: int, parent: Hashable, tokens: bytes) -> None:
        self.blocks[block_id] = parent, tokens
        children = self._children.setdefault(parent, [])
        insort(children, (tokens, block_id))

    def remove(self, block_id: int) -> bytes:
        """The block's tokens, or b"" if it is not there."""
        if block_id not in self.blocks:
            return b""
        parent, tokens = self.blocks.pop(block_id)
        children = self._children[parent]
        place = bisect_left(children, (tokens, block_id))
        del children[place]
        if not children:
            del self._children[parent]
        return tokens

    def longest(self, parent: Hashable, tokens: bytes) -> tuple[int, int]:
        """The block that begins with most of these tokens, and with how many; (-1, 0) if there is none."""
        children = self._children.get(parent, [])
        i = bisect_left(children, (tokens,))
        best = -1, 0
        for others, block_id in children[max(i - 1, 0) : i + 1]:
            length = count_common(others, tokens)
            if length > best[1]:
                best = block_id, length
        return best


def count_common(first: bytes, second: bytes) -> int:
    """How many tokens two lists of packed tokens begin with in common."""
    length = min(len(first), len(second)) // TOKEN_BYTES
    differ = np.frombuffer(first, "<i8", length) != np.frombuffer(second, "<i8", length)
    return int(differ.argmax()) if differ.any() else length
