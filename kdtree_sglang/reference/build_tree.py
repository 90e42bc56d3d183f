"""Reference of build_tree: best-first search over the product of per-depth marginals."""

import heapq
import math
from typing import NamedTuple

import numpy as np


class Tree(NamedTuple):
    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    log_mass: np.ndarray
    positions: np.ndarray
    ancestors: np.ndarray
    next_token: np.ndarray
    next_sibling: np.ndarray
    num_nodes: np.ndarray


def best_first(log_probs: np.ndarray, budget: int) -> list[tuple[float, tuple[int, ...], int]]:
    """The nodes of one tree besides the root, in order: (key, path of ranks, parent's number).

    log_probs is [L, K] float32. Python's floats are doubles, and the sums are written in the order
    that the contract fixes. heapq pops the smallest item, so keys are negated; on equal keys it
    compares the paths, and Python orders tuples lexicographically, a proper prefix first.
    """
    levels, candidates = log_probs.shape
    lp = log_probs.astype(np.float64).tolist()
    nodes: list[tuple[float, tuple[int, ...], int]] = []
    frontier: list[tuple[float, tuple[int, ...], int]] = []

    def push(key: float, path: tuple[int, ...], parent: int) -> None:
        if math.isfinite(lp[len(path) - 1][path[-1]]):
            heapq.heappush(frontier, (-key, path, parent))

    push(lp[0][0], (0,), 0)
    while frontier and len(nodes) < budget:
        negated, path, parent = heapq.heappop(frontier)
        w, depth, rank = -negated, len(path), path[-1]
        nodes.append((w, path, parent))
        if rank + 1 < candidates:
            sibling = (w - lp[depth - 1][rank]) + lp[depth - 1][rank + 1]
            push(sibling, path[:-1] + (rank + 1,), parent)
        if depth < levels:
            push(w + lp[depth][0], path + (0,), len(nodes))
    return nodes


def build_tree(
    ids: np.ndarray, log_probs: np.ndarray, root: np.ndarray, prefix_lens: np.ndarray, budget: int
) -> Tree:
    bs = ids.shape[0]
    n = budget + 1
    words = (n + 63) // 64

    tokens = np.repeat(root.astype(np.int64)[:, None], n, axis=1)
    parents = np.zeros((bs, n), np.int32)
    parents[:, 0] = -1
    depths = np.zeros((bs, n), np.int32)
    log_mass = np.full((bs, n), -np.inf, np.float32)
    log_mass[:, 0] = 0.0
    ancestors = np.zeros((bs, n, words), np.uint64)
    for i in range(n):
        ancestors[:, i, i // 64] = np.uint64(1) << np.uint64(i % 64)
    next_token = np.full((bs, n), -1, np.int32)
    next_sibling = np.full((bs, n), -1, np.int32)
    num_nodes = np.ones(bs, np.int32)

    for b in range(bs):
        last_child: dict[int, int] = {}
        for i, (key, path, parent) in enumerate(best_first(log_probs[b], budget), start=1):
            tokens[b, i] = ids[b, len(path) - 1, path[-1]]
            parents[b, i] = parent
            depths[b, i] = len(path)
            with np.errstate(over="ignore"):
                log_mass[b, i] = np.float32(key)
            ancestors[b, i] |= ancestors[b, parent]
            if parent in last_child:
                next_sibling[b, last_child[parent]] = i
            else:
                next_token[b, parent] = i
            last_child[parent] = i
            num_nodes[b] = i + 1

    return Tree(
        tokens,
        parents,
        depths,
        log_mass,
        prefix_lens.astype(np.int64)[:, None] + depths,
        ancestors.view(np.int64),
        next_token,
        next_sibling,
        num_nodes,
    )
