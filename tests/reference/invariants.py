"""What holds of every output of an op, stated from its contract and checked without a second
implementation. Arguments and outputs are numpy arrays, so references and ops are checked alike.
"""

import numpy as np


def bit_sets(words: np.ndarray) -> list[set[int]]:
    """The numbers of the set bits of each row of [N, W] int64 words."""
    rows = np.ascontiguousarray(words).view(np.uint64).tolist()
    return [
        {64 * w + bit for w, word in enumerate(row) for bit in range(64) if word >> bit & 1}
        for row in rows
    ]


def children_of(next_token: np.ndarray, next_sibling: np.ndarray, node: int) -> list[int]:
    """The list of children that the links of one request name; fails rather than loop."""
    children: list[int] = []
    child = int(next_token[node])
    while child != -1:
        assert child not in children, f"the children of node {node} loop"
        children.append(child)
        child = int(next_sibling[child])
    return children


def check_tree(tree, ids, log_probs, root, prefix_lens, budget: int) -> None:
    """`tree` is a draft tree over these arguments of build_tree, and no larger one exists."""
    for b in range(ids.shape[0]):
        row = type(tree)(*(field[b] for field in tree))
        _check_one_tree(row, ids[b], log_probs[b], int(root[b]), int(prefix_lens[b]), budget)


def _check_one_tree(tree, ids, log_probs, root: int, prefix_len: int, budget: int) -> None:
    levels, candidates = ids.shape
    n = budget + 1
    count = int(tree.num_nodes)
    parents, depths = tree.parents.tolist(), tree.depths.tolist()
    assert 1 <= count <= n
    assert (parents[0], depths[0], tree.tokens[0], tree.log_mass[0]) == (-1, 0, root, 0.0)

    # Parents come strictly before children, one depth above them.
    for i in range(1, count):
        assert 0 <= parents[i] < i
        assert depths[i] == depths[parents[i]] + 1 <= levels
    assert tree.positions.tolist() == [prefix_len + depth for depth in depths]

    # What a row sees is the transitive closure of parents: itself and whatever its parent sees.
    closure = [{0}]
    for i in range(1, n):
        closure.append(closure[parents[i]] | {i} if i < count else {i})
    assert bit_sets(tree.ancestors) == closure

    # The links name exactly the children of each node, ascending; a child's place is its rank.
    children = [children_of(tree.next_token, tree.next_sibling, i) for i in range(n)]
    assert children == [[j for j in range(1, count) if parents[j] == i] for i in range(n)]
    assert [tree.next_sibling[i] for i in range(n) if not 0 < i < count] == [-1] * (n - count + 1)
    rank = {child: r for brothers in children for r, child in enumerate(brothers)}
    assert all(r < candidates for r in rank.values())

    # Tokens are the candidates'; a node's mass is the sum over its path, whatever order it is in.
    finite = np.isfinite(log_probs)
    lp = np.where(finite, log_probs, 0.0).astype(np.float64)
    cancelled = np.abs(lp).max() * 1e-12
    exact = [0.0] * count
    for i in range(1, count):
        depth = depths[i]
        assert tree.tokens[i] == ids[depth - 1, rank[i]]
        assert finite[depth - 1, : rank[i] + 1].all(), "a candidate that is not finite entered"
        exact[i] = exact[parents[i]] + lp[depth - 1, rank[i]]
        path = [log_probs[depths[j] - 1, rank[j]] for j in closure[i] if j != 0]
        allowed = 1e-7 * np.abs(np.array(path, np.float64)).sum() + cancelled
        assert abs(float(tree.log_mass[i]) - exact[i]) <= allowed

    # What could have entered next: the first child and the next brother of each node.
    waiting = [
        exact[i] + lp[depths[i], len(children[i])]
        for i in range(count)
        if depths[i] < levels
        and len(children[i]) < candidates
        and finite[depths[i], len(children[i])]
    ]
    assert count == n or not waiting, "the tree stopped early"

    # With sorted log-probabilities mass never rises, and nothing that waits is better than what
    # entered. A brother's key may exceed its elder's by the rounding of doubles only.
    used = np.where(finite.cumprod(axis=-1) != 0, log_probs, -np.inf)
    if (used <= 0).all() and (used[:, 1:] <= used[:, :-1]).all():
        mass = tree.log_mass[:count]
        assert (mass[1:] <= np.nextafter(mass[:-1], np.float32(np.inf))).all()
        least = min(exact[1:], default=0.0)
        assert all(key <= least + 1e-12 * abs(least) for key in waiting)

    # Rows past the end.
    assert tree.tokens[count:].tolist() == [root] * (n - count)
    assert parents[count:] == depths[count:] == [0] * (n - count)
    assert np.isneginf(tree.log_mass[count:]).all()


def check_acceptance(
    accepted, tokens, next_token, next_sibling, num_nodes, predictions, prefix_lens, max_depth: int
) -> None:
    """`accepted` is a longest walk along well-formed links that the predictions agree to."""
    for b in range(tokens.shape[0]):
        length = int(accepted.accept_len[b])
        path = accepted.path[b].tolist()
        assert 0 <= length <= max_depth
        assert path[0] == 0
        assert path[length + 1 :] == [-1] * (max_depth - length)
        walked = path[: length + 1]
        assert all(j <= node < num_nodes[b] for j, node in enumerate(walked))
        for parent, child in zip(walked, walked[1:], strict=False):
            assert parent < child
            brothers = children_of(next_token[b], next_sibling[b], parent)
            wanted = [node for node in brothers if tokens[b, node] == predictions[b, parent]]
            assert child == wanted[0]
        last = walked[-1]
        bonus = int(predictions[b, last])
        if length < max_depth:
            ends = children_of(next_token[b], next_sibling[b], last)
            assert bonus not in [int(tokens[b, node]) for node in ends], "the walk stopped early"
        assert accepted.bonus[b] == bonus
        drafts = [int(tokens[b, node]) for node in walked[1:]]
        assert accepted.out_tokens[b].tolist() == [*drafts, bonus] + [0] * (max_depth - length)
        assert accepted.new_seq_lens[b] == prefix_lens[b] + length + 1


def check_topk(top, logits, k: int, vocab_start: int = 0) -> None:
    """`top` lists the k first elements of each row by value, then smaller id."""
    values = np.where(np.isnan(logits), np.float32(-np.inf), logits)
    rows, vocab = logits.shape
    assert top.ids.shape == top.values.shape == (rows, k)
    for row in range(rows):
        ids = (top.ids[row] - vocab_start).tolist()
        assert len(set(ids)) == k
        assert all(0 <= i < vocab for i in ids)
        assert top.values[row].tolist() == values[row, ids].tolist()
        kept = [(-values[row, i], i) for i in ids]
        assert kept == sorted(kept)
        left = set(range(vocab)) - set(ids)
        assert all((-values[row, i], i) > kept[-1] for i in left)
