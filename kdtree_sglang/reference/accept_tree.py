"""Reference of accept_tree."""

from typing import NamedTuple

import numpy as np


class Acceptance(NamedTuple):
    path: np.ndarray
    accept_len: np.ndarray
    bonus: np.ndarray
    out_tokens: np.ndarray
    new_seq_lens: np.ndarray


def accept_tree(
    tokens: np.ndarray,
    next_token: np.ndarray,
    next_sibling: np.ndarray,
    num_nodes: np.ndarray,
    predictions: np.ndarray,
    prefix_lens: np.ndarray,
    max_depth: int,
) -> Acceptance:
    bs, n = tokens.shape
    path = np.full((bs, max_depth + 1), -1, np.int32)
    accept_len = np.zeros(bs, np.int32)
    bonus = np.zeros(bs, np.int64)
    out_tokens = np.zeros((bs, max_depth + 1), np.int64)

    def children(b: int, node: int) -> list[int]:
        """The children in brother order; a link that does not lead upwards in number ends it."""
        found: list[int] = []
        above, child = node, int(next_token[b, node])
        while above < child < min(int(num_nodes[b]), n):
            found.append(child)
            above, child = child, int(next_sibling[b, child])
        return found

    for b in range(bs):
        node, length = 0, 0
        path[b, 0] = 0
        while length < max_depth:
            wanted = predictions[b, node]
            matches = [child for child in children(b, node) if tokens[b, child] == wanted]
            if not matches:
                break
            node = matches[0]
            out_tokens[b, length] = tokens[b, node]
            length += 1
            path[b, length] = node
        accept_len[b] = length
        bonus[b] = predictions[b, node]
        out_tokens[b, length] = bonus[b]

    return Acceptance(path, accept_len, bonus, out_tokens, prefix_lens + accept_len + 1)
