"""Finds the block that has the longest beginning in common with some tokens.

Knows hashes, tokens and numbers of blocks; nothing about who owns them. The idea: blocks that follow the same
tokens are kept sorted by their own, so the one that has most in common with some tokens is a neighbour of the
place where these would stand. Finding it takes a binary search, however many blocks there are.
"""

from bisect import bisect_left, insort


class PrefixIndex:
    """Of each block: the hash of the block before it (`parent`, -1 for a first block), and its tokens."""

    def __init__(self) -> None:
        self._children: dict[int, list[tuple[list[int], int]]] = {}  # by parent: (tokens, block id), sorted

    def add(self, parent: int, token_ids: list[int], block_id: int) -> None:
        insort(self._children.setdefault(parent, []), (token_ids, block_id))

    def remove(self, parent: int, token_ids: list[int], block_id: int) -> None:
        """Does nothing if the block is not there."""
        children = self._children.get(parent, [])
        i = bisect_left(children, (token_ids, block_id))
        if children[i : i + 1] == [(token_ids, block_id)]:
            del children[i]
            if not children:
                del self._children[parent]

    def longest(self, parent: int, token_ids: list[int]) -> tuple[int, int]:
        """The block that begins with most of these tokens, and with how many; (-1, 0) if none does."""
        children = self._children.get(parent, [])
        i = bisect_left(children, (token_ids,))
        best = -1, 0
        for others, block_id in children[max(i - 1, 0) : i + 1]:
            if (num_common := num_common_tokens(others, token_ids)) > best[1]:
                best = block_id, num_common
        return best


def num_common_tokens(a: list[int], b: list[int]) -> int:
    """How many tokens both begin with. Compares halves: slices are compared in C."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
