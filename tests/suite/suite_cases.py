"""Writes the kernel suite's cases, one KDTR file each, from the numpy references alone.

    python tests/suite/suite_cases.py FOLDER

A case's arguments are tensors `in.NAME`, what the op must give is `out.NAME`; numbers are tensors
of rank 0. The op is the file name up to the first dash. Seeds are fixed: every run writes the same
bytes.

    build, accept, mask, gather, compact    bit-equal
    topk, merge                             ids and values bit-equal; lse within 1e-5 + 1e-6 |lse|
    attention                               in.f32.* and in.bf16.*; out.f32.out is float64
    compose                                 one decode step, each op on what the one before gave

Attention's expected output is softmax over the whole sequence in float64. The op gets what a prefix
pass would give it: prefix_out and prefix_lse, computed in float64 and rounded. NaN in an expected
output marks a row that is undefined, as the row of an unused node whose k_tail is NaN.
"""

import sys
from pathlib import Path

import ml_dtypes
import numpy as np

from kdtree_sglang import kdtr, reference

Case = dict[str, np.ndarray]

LATENT, ROPE = 512, 64
INF = np.float32(np.inf)


def case_of(arguments: dict, results: dict) -> Case:
    """Names arguments and results as a case file does."""
    named = {f"in.{name}": np.asarray(value) for name, value in arguments.items()}
    return named | {f"out.{name}": np.asarray(value) for name, value in results.items()}


def log_probs(rng: np.random.Generator, bs: int, levels: int, k: int, peak: float) -> np.ndarray:
    """[bs, levels, k] float32 as a drafter gives them; a higher peak makes deeper trees."""
    logits = rng.standard_normal((bs, levels, 4 * k)) * peak
    lse = np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return (np.sort(logits - lse, axis=-1)[..., : -k - 1 : -1]).astype(np.float32)


def distinct_ids(rng: np.random.Generator, bs: int, levels: int, k: int) -> np.ndarray:
    """[bs, levels, k] token ids, distinct within a depth and repeated across depths."""
    return np.argsort(rng.random((bs, levels, k + 3)), axis=-1)[..., :k]


def build_case(ids, lp, root, prefix_lens, budget: int) -> Case:
    arguments = {"ids": ids, "log_probs": lp, "root": root, "prefix_lens": prefix_lens}
    tree = reference.build_tree(ids, lp, root, prefix_lens, budget)
    return case_of(arguments | {"budget": np.int64(budget)}, tree._asdict())


def drawn_build(seed: int, bs: int, levels: int, k: int, budget: int, peak: float = 4.0) -> Case:
    rng = np.random.default_rng(seed)
    lp = log_probs(rng, bs, levels, k, peak)
    ids = distinct_ids(rng, bs, levels, k)
    return build_case(ids, lp, rng.integers(0, k, bs), rng.integers(0, 100_000, bs), budget)


def build_underfull() -> Case:
    """Few finite candidates, so that the queue runs dry before the budget."""
    rng = np.random.default_rng(14)
    lp = log_probs(rng, 4, 7, 8, 2.0)
    lp[0, :, 1:] = -INF
    lp[1, :, 2:] = -INF
    lp[1, 3:, :] = -INF
    lp[2, 1:, :] = -INF
    lp[3, 0, 1:] = lp[3, 1, 3:] = lp[3, 2:, :] = -INF
    ids = distinct_ids(rng, 4, 7, 8)
    return build_case(ids, lp, rng.integers(0, 8, 4), rng.integers(0, 100, 4), 48)


def build_ties() -> Case:
    """Equal keys, where the path of ranks decides, and near ties, where the rounding of sums does.

    Requests 0..2 have one value everywhere, 3 zeros of both signs, so that its tree goes as deep as
    it can, 4..7 multiples of 1/2. The rest take few values from 1e-20 to 10; with this seed another
    order of the sums gives three of them another tree.
    """
    rng = np.random.default_rng(39)
    bs, levels, k = 40, 12, 40
    palette = -np.sort(10.0 ** rng.uniform(-20, 1, (bs, 1, 20)), axis=-1)
    steps = rng.integers(0, 20, (bs, levels, 1))
    steps = np.minimum(steps + np.cumsum(rng.integers(0, 2, (bs, levels, k)), axis=-1), 19)
    lp = np.take_along_axis(palette, steps.reshape(bs, 1, -1), axis=-1).reshape(bs, levels, k)
    lp = lp.astype(np.float32)
    lp[:3] = -rng.uniform(0.1, 2.0, (3, 1, 1))
    lp[3] = rng.choice([-0.0, 0.0], (levels, k))
    # Sums that are -0.0 need an unbroken line of them from the root.
    lp[3, :2, 0] = -0.0
    lp[4:8] = np.round(log_probs(rng, 4, levels, k, 1.0) * 2) / 2
    ids = distinct_ids(rng, bs, levels, k)
    return build_case(ids, lp, rng.integers(0, k, bs), rng.integers(0, 100, bs), 80)


def build_minus_infinity() -> Case:
    """-inf, NaN and +inf at the first, a middle and the last rank, at every depth."""
    rng = np.random.default_rng(20)
    specials = [-INF, np.float32(np.nan), INF]
    levels, k = 5, 6
    places = [(d, r) for d in range(levels) for r in (0, 2, k - 1)]
    bs = len(specials) * len(places)
    lp = log_probs(rng, bs, levels, k, 1.0)
    for b, (special, (d, r)) in enumerate((s, place) for s in specials for place in places):
        lp[b, d, r] = special
    ids = distinct_ids(rng, bs, levels, k)
    return build_case(ids, lp, rng.integers(0, k, bs), rng.integers(0, 100, bs), 64)


def build_token_0() -> Case:
    """Token 0 is a token: as the root, as every candidate, as some."""
    rng = np.random.default_rng(21)
    lp = log_probs(rng, 3, 7, 16, 2.0)
    ids = distinct_ids(rng, 3, 7, 16)
    ids[0] = 0
    ids[1, :, 0] = 0
    return build_case(ids, lp, np.array([0, 0, 5]), np.array([0, 1, 2]), 16)


def accept_case(tree, predictions, prefix_lens, max_depth: int) -> Case:
    arguments = {
        "tokens": tree["tokens"],
        "next_token": tree["next_token"],
        "next_sibling": tree["next_sibling"],
        "num_nodes": tree["num_nodes"],
        "predictions": predictions,
        "prefix_lens": prefix_lens,
    }
    accepted = reference.accept_tree(*arguments.values(), max_depth)
    return case_of(arguments | {"max_depth": np.int64(max_depth)}, accepted._asdict())


def drawn_tree(seed: int, bs: int, levels: int, k: int, budget: int, peak: float = 4.0):
    """(fields of a drawn tree, its prefix lengths)."""
    case = drawn_build(seed, bs, levels, k, budget, peak)
    tree = {name[4:]: value for name, value in case.items() if name.startswith("out.")}
    return tree, case["in.prefix_lens"]


def nodes_to(tree, b: int, node: int) -> list[int]:
    """The nodes from the root to `node`."""
    walk = [node]
    while walk[0] != 0:
        walk.insert(0, int(tree["parents"][b, walk[0]]))
    return walk


def follow(tree, predictions: np.ndarray, b: int, walk: list[int]) -> None:
    """Sets predictions so that the target takes this walk and then a token nobody drafted."""
    for parent, child in zip(walk, walk[1:], strict=False):
        predictions[b, parent] = tree["tokens"][b, child]
    predictions[b, walk[-1]] = 1_000_000 + b


def accept_lengths() -> Case:
    """Request b accepts b + 1 drafts, along the youngest node of that depth."""
    tree, prefix = drawn_tree(30, 8, 8, 24, 96, peak=8.0)
    predictions = np.full(tree["tokens"].shape, -1)
    for b in range(8):
        node = int(np.flatnonzero(tree["depths"][b] == b + 1)[-1])
        follow(tree, predictions, b, nodes_to(tree, b, node))
    case = accept_case(tree, predictions, prefix, 8)
    assert case["out.accept_len"].tolist() == list(range(1, 9))
    return case


def accept_early_stop() -> Case:
    """The target leaves the tree, although other nodes carry the token that it wants."""
    tree, prefix = drawn_tree(31, 4, 7, 12, 40)
    predictions = np.full(tree["tokens"].shape, -1)
    for b in range(4):
        tokens, parents = tree["tokens"][b], tree["parents"][b]
        walk = nodes_to(tree, b, int(np.flatnonzero(tree["depths"][b] == b)[-1]))
        follow(tree, predictions, b, walk)
        elsewhere = set(tokens.tolist()) - set(tokens[parents == walk[-1]].tolist())
        predictions[b, walk[-1]] = min(elsewhere)
    case = accept_case(tree, predictions, prefix, 7)
    assert case["out.accept_len"].tolist() == [0, 1, 2, 3]
    return case


def accept_whole_chain() -> Case:
    """Chains that the target takes whole, as far as max_depth allows."""
    tree, prefix = drawn_tree(32, 3, 15, 1, 31)
    predictions = np.roll(tree["tokens"], -1, axis=1)
    case = accept_case(tree, predictions, prefix, 15)
    assert case["out.accept_len"].tolist() == [15, 15, 15]
    return case


def accept_malformed() -> Case:
    """Rings, self-links, links past the end and counts outside the row; the target wants token 7.

    Written-out rows first: (next_token by node, next_sibling by node, count, the token of all).
    """
    rng = np.random.default_rng(33)
    n = 12
    chain = dict(enumerate(range(1, n + 1)))
    rows = [
        ({0: 1, 1: 2, 2: 0}, {}, n, 7),  # a child that leads back to the root
        ({0: 0}, {}, n, 7),  # a root that is its own child
        ({0: 2}, {2: 3, 3: 2}, n, 8),  # brothers in a ring, none of them wanted
        ({0: 2}, {2: 2}, n, 8),  # a brother that is itself
        ({0: n}, {}, n + 5, 7),  # a child outside the row
        *((chain, {}, count, 7) for count in (n, n + 5, 5, 1, 0, -3)),
    ]
    drawn = 24
    bs = len(rows) + drawn
    links = np.full((2, bs, n), -1, np.int64)
    tokens = rng.integers(7, 9, (bs, n))
    num_nodes = rng.integers(1, n + 5, bs).astype(np.int32)
    for b, (children, brothers, count, token) in enumerate(rows):
        for kind, named in enumerate((children, brothers)):
            links[kind, b, list(named)] = list(named.values())
        num_nodes[b], tokens[b] = count, token
    for i, (low, high) in enumerate(((-1, n + 2), (-2, 3), (-(2**31), 2**31))):
        at = slice(len(rows) + 8 * i, len(rows) + 8 * (i + 1))
        links[:, at] = rng.integers(low, high, (2, 8, n))
    tree = {
        "tokens": tokens,
        "next_token": links[0].astype(np.int32),
        "next_sibling": links[1].astype(np.int32),
        "num_nodes": num_nodes,
    }
    return accept_case(tree, np.full((bs, n), 7), rng.integers(0, 100, bs), 9)


def accept_brothers() -> Case:
    """Nodes above 64, wide lists of brothers, brothers with one token, tokens 0 and -1."""
    tree, prefix = drawn_tree(34, 4, 6, 60, 127, peak=0.5)
    predictions = np.full(tree["tokens"].shape, -1)
    for b in range(4):
        follow(tree, predictions, b, nodes_to(tree, b, 127 - 20 * b))
    first, second = np.flatnonzero(tree["parents"][2] == 0)[[1, 3]]
    tree["tokens"][2, [first, second]] = predictions[2, 0] = 0
    child = int(np.flatnonzero(tree["parents"][3] == 0)[-1])
    tree["tokens"][3, child] = predictions[3, 0] = -1
    return accept_case(tree, predictions, prefix, 6)


def accept_batch_64() -> Case:
    rng = np.random.default_rng(35)
    tree, prefix = drawn_tree(35, 64, 7, 12, 32)
    predictions = rng.integers(0, 15, tree["tokens"].shape)
    for b in range(64):
        follow(tree, predictions, b, nodes_to(tree, b, int(rng.integers(0, 33))))
    return accept_case(tree, predictions, prefix, 7)


def softmax_rows(scores: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(softmax(scores) @ values, log-sum-exp) in float64; scores [rows, keys], may hold -inf."""
    greatest = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - greatest)
    sums = weights.sum(axis=-1, keepdims=True)
    return (weights @ values) / sums, (greatest + np.log(sums))[:, 0]


def attention_tensors(
    rng: np.random.Generator, ancestors: np.ndarray, heads: int, prefix_lens: list[int], dtype
) -> tuple[dict, np.ndarray, float]:
    """(q, k_tail, prefix_out, prefix_lse, prefix_kv by name, the exact output, scale)."""
    bs, n, _ = ancestors.shape
    scale = 1.3 / np.sqrt(LATENT + ROPE)
    # A direction that queries and tail keys share, in the part of the keys that values do not
    # have, gives the tail about as much weight as the whole prefix.
    shared = np.zeros(LATENT + ROPE)
    shared[LATENT:] = 1 / np.sqrt(ROPE)

    def rows(*shape: int) -> np.ndarray:
        return rng.standard_normal((*shape, LATENT + ROPE))

    q = (rows(bs, n, heads) + 12 * shared).astype(dtype)
    tails = [rows(n) + shared * max(0.0, np.log(max(p, 1)) - 1) / (12 * scale) for p in prefix_lens]
    k_tail = np.stack(tails).astype(dtype)
    prefix_kv = [rows(p).astype(dtype) for p in prefix_lens]

    prefix_out = np.full((bs, n * heads, LATENT), np.nan)
    prefix_lse = np.empty((bs, n * heads))
    exact = np.empty((bs, n * heads, LATENT))
    for b in range(bs):
        queries = q[b].astype(np.float64).reshape(n * heads, -1)
        keys = np.concatenate([prefix_kv[b], k_tail[b]]).astype(np.float64)
        bits = ancestors[b, :, np.arange(n) // 64].T >> np.arange(n) % 64 & 1
        scores = queries @ keys.T * scale
        before = prefix_lens[b]
        scores[:, before:][~np.repeat(bits.astype(bool), heads, axis=0)] = -np.inf
        exact[b], _ = softmax_rows(scores, keys[:, :LATENT])
        if before > 0:
            prefix_out[b], prefix_lse[b] = softmax_rows(
                scores[:, :before], keys[:before, :LATENT]
            )
        else:
            # Both conventions of an empty prefix; prefix_out must not be read then.
            prefix_lse[b] = np.where(np.arange(n * heads) % 3 == 0, -np.inf, np.inf)
    tensors = {
        "q": q.reshape(bs * n, heads, -1),
        "k_tail": k_tail.reshape(bs * n, -1),
        "prefix_out": prefix_out.astype(dtype).reshape(bs * n, heads, LATENT),
        "prefix_lse": prefix_lse.reshape(bs, n, heads).transpose(0, 2, 1).astype(np.float32),
        "prefix_kv": np.concatenate(prefix_kv),
    }
    return tensors, exact.reshape(bs * n, heads, LATENT), float(scale)


def attention_case(
    seed: int, heads: int, prefix_lens: list[int], budget: int, levels: int = 7, k: int = 16
) -> Case:
    bs = len(prefix_lens)
    tree, _ = drawn_tree(seed, bs, levels, k, budget)
    ancestors = tree["ancestors"]
    unused = (np.arange(budget + 1) >= tree["num_nodes"][:, None]).reshape(-1)
    arguments = {"ancestors": ancestors, "prefix_lens": np.array(prefix_lens)}
    results = {}
    for name, dtype in (("f32", np.float32), ("bf16", ml_dtypes.bfloat16)):
        rng = np.random.default_rng(seed)
        tensors, exact, scale = attention_tensors(rng, ancestors, heads, prefix_lens, dtype)
        tensors["k_tail"][unused] = np.nan
        exact[unused] = np.nan
        arguments["scale"] = np.float64(scale)
        arguments |= {f"{name}.{field}": value for field, value in tensors.items()}
        results[f"{name}.out"] = exact
    # float64 is for the path that is held to 1e-6 of it.
    results["bf16.out"] = results["bf16.out"].astype(np.float32)
    return case_of(arguments, results)


def topk_case(seed: int, rows: int, vocab: int, k: int, dtype) -> Case:
    """Rows with many ties, NaN and infinities; the last row has nothing that is finite."""
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((rows, vocab)) * 4).astype(np.float32)
    logits[0] = np.round(logits[0])
    logits[1] = rng.choice(np.array([-0.0, 0.0], np.float32), vocab)
    logits[2, rng.random(vocab) < 0.5] = np.nan
    logits[2, rng.random(vocab) < 0.2] = -np.inf
    logits[-1] = np.where(rng.random(vocab) < 0.5, np.float32(np.nan), -INF)
    logits = logits.astype(dtype)
    start = 1000
    top = reference.draft_topk(logits.astype(np.float32), k, start)
    arguments = {"logits": logits, "k": np.int64(k), "vocab_start": np.int64(start)}
    return case_of(arguments, top._asdict())


def merge_shards() -> Case:
    """Shards whose ids do not ascend with the shard, with ties within and across them."""
    rng = np.random.default_rng(42)
    shards, rows, k, k_out = 4, 6, 24, 40
    values = np.round(rng.standard_normal((shards, rows, k)) * 3).astype(np.float32)
    values[:, 1] = 0.5
    values[1, 2, ::3] = np.nan
    values[2, 2, ::4] = -np.inf
    ids = rng.permuted(np.broadcast_to(np.arange(shards * k), (rows, shards * k)), axis=1)
    ids = np.ascontiguousarray(ids.reshape(rows, shards, k).transpose(1, 0, 2))
    lse = rng.uniform(5, 20, (shards, rows)).astype(np.float32)
    lse[0, 3], lse[:, 4], lse[2, 5] = -np.inf, -np.inf, np.nan
    merged = reference.merge_topk(ids, values, lse, k_out)
    arguments = {"ids": ids, "values": values, "lse": lse, "k_out": np.int64(k_out)}
    return case_of(arguments, merged._asdict())


def mask_case(seed: int, budget: int, prefix_lens: list[int], cut: int) -> Case:
    """The mask's last `cut` cells are missing, so that what falls there must be dropped."""
    bs = len(prefix_lens)
    tree, _ = drawn_tree(seed, bs, 7, 24, budget)
    n = budget + 1
    prefix = np.array(prefix_lens)
    indptr = np.concatenate([[0], np.cumsum(n * (np.maximum(prefix, 0) + n))]) + 5
    before = np.full(int(indptr[-1]) + 3 - cut, 0x5A, np.uint8)
    arguments = {"ancestors": tree["ancestors"], "prefix_lens": prefix, "mask_indptr": indptr}
    results = {}
    for name, write_prefix in (("tree", False), ("whole", True)):
        mask = before.copy()
        reference.tree_mask(tree["ancestors"], prefix, mask, indptr, write_prefix)
        results[name] = mask
    return case_of(arguments | {"mask": before}, results)


def gather_case(seed: int, bs: int, n: int, steps: int, width: int, dtype) -> Case:
    """Paths that end early, that lead outside the request, and all of a request."""
    rng = np.random.default_rng(seed)
    path = np.sort(rng.integers(0, n, (bs, steps)), axis=-1).astype(np.int32)
    path[0, steps // 2 :] = -1
    path[1, [0, 2]] = [n, 2**31 - 1]
    path[2, 1] = -(2**31)
    rows = rng.standard_normal((bs * n, width)).astype(dtype)
    arguments = {"rows": rows, "path": path, "num_nodes_per_request": np.int64(n)}
    return case_of(arguments, {"out": reference.gather_path(rows, path, n)})


def compact_case(arguments: dict, buffers: list[np.ndarray]) -> Case:
    moved = [buffer.copy() for buffer in buffers]
    reference.compact_kv(moved, **arguments)
    named = {f"kv.{i}": buffer for i, buffer in enumerate(buffers)}
    results = {f"kv.{i}": buffer for i, buffer in enumerate(moved)}
    return case_of(arguments | named, results)


def compact_scattered() -> Case:
    """Accept lengths 0..8 over scattered slots, and rows of every alignment."""
    rng = np.random.default_rng(50)
    bs, n, steps = 9, 33, 9
    path = np.full((bs, steps), -1, np.int32)
    for b in range(bs):
        path[b, : b + 1] = [0, *np.sort(rng.choice(np.arange(1, n), b, replace=False))]
    arguments = {
        "slots": rng.permutation(bs * n + 7)[: bs * n].reshape(bs, n),
        "path": path,
        "accept_len": np.arange(bs, dtype=np.int32),
    }
    sizes = (1152, 576, 24, 12, 6, 7)
    rows = bs * n + 7
    return compact_case(arguments, [rng.integers(0, 256, (rows, s), np.uint8) for s in sizes])


def compact_overlapping() -> Case:
    """Each move's target is the source of a later one; more moves than one batch of loads."""
    rng = np.random.default_rng(51)
    n, moves = 64, 40
    slots = np.stack([np.arange(n) + 3, np.arange(n)[::-1] + 70, np.arange(n) + 140])
    shifts = np.array([[1], [2], [7]])
    path = np.concatenate([np.zeros((3, 1), int), np.arange(1, moves + 1) + shifts], axis=1)
    arguments = {
        "slots": slots,
        "path": path.astype(np.int32),
        "accept_len": np.full(3, moves, np.int32),
    }
    return compact_case(arguments, [rng.integers(0, 256, (210, s), np.uint8) for s in (1152, 48)])


def compact_malformed() -> Case:
    """Lengths and nodes outside their ranges, and slots that name no row: nothing moves there."""
    rng = np.random.default_rng(52)
    slots = rng.permutation(60)[:48].reshape(6, 8)
    slots[2, [3, 4]] = -1
    path = np.array(
        [
            [0, -1, 8, 2**31 - 1],
            [0, -(2**31), 3, 0],
            [0, 3, 4, 5],
            [0, 2, 3, 4],
            [0, 2, 3, 4],
            [0, 2, 4, 7],
        ],
        np.int32,
    )
    lengths = np.array([3, 3, 3, 2**31 - 1, -5, 0], np.int32)
    arguments = {"slots": slots, "path": path, "accept_len": lengths}
    return compact_case(arguments, [rng.integers(0, 256, (60, s), np.uint8) for s in (48, 7)])


def compose_step() -> Case:
    """One decode step: build_tree, tree_attention, draft_topk (k = 1), accept_tree, gather_path,
    compact_kv.

    A row's attention output over all heads serves as its logits, so every op works on what the one
    before it gave. The trees' shapes follow from log_probs alone; the token ids are then chosen so
    that the target's tokens follow a walk of 0, 3, 5 and 7 drafts.
    """
    rng = np.random.default_rng(61)
    bs, levels, k, budget, heads = 4, 7, 24, 80, 2
    n = budget + 1
    prefix_lens = [2, 40, 1, 300]
    lp = log_probs(rng, bs, levels, k, 5.0)
    ids = rng.integers(0, heads * LATENT, (bs, levels, k))
    root = rng.integers(0, heads * LATENT, bs)
    prefix = np.array(prefix_lens)
    shape = reference.build_tree(ids, lp, root, prefix, budget)
    assert (shape.num_nodes == n).all()
    tensors, exact, scale = attention_tensors(
        rng, shape.ancestors, heads, prefix_lens, np.float32
    )
    logits = exact.reshape(bs * n, heads * LATENT)
    two = np.sort(logits, axis=-1)[:, -2:]
    assert (two[:, 1] - two[:, 0]).min() > 2e-5, "the error of float32 could change a token"
    predictions = logits.argmax(axis=-1).reshape(bs, n)
    for b, length in enumerate((0, 3, 5, 7)):
        walk = nodes_to(shape._asdict(), b, int(np.flatnonzero(shape.depths[b] == length)[-1]))
        for parent, child in zip(walk, walk[1:], strict=False):
            brothers = np.flatnonzero(shape.parents[b] == parent).tolist()
            ids[b, shape.depths[b, child] - 1, brothers.index(child)] = predictions[b, parent]

    tree = reference.build_tree(ids, lp, root, prefix, budget)
    accepted = reference.accept_tree(
        tree.tokens, tree.next_token, tree.next_sibling, tree.num_nodes, predictions, prefix, levels
    )
    assert accepted.accept_len.tolist() == [0, 3, 5, 7]
    slots = rng.permutation(bs * n + 20)[: bs * n].reshape(bs, n)
    buffers = [rng.integers(0, 256, (bs * n + 20, size), np.uint8) for size in (1152, 576)]
    moved = [buffer.copy() for buffer in buffers]
    reference.compact_kv(moved, slots, accepted.path, accepted.accept_len)
    arguments = {
        "ids": ids,
        "log_probs": lp,
        "root": root,
        "prefix_lens": prefix,
        "budget": np.int64(budget),
        "scale": np.float64(scale),
        "slots": slots,
        **{name: tensors[name] for name in ("q", "k_tail", "prefix_out", "prefix_lse")},
        **{f"kv.{i}": buffer for i, buffer in enumerate(buffers)},
    }
    results = {
        **tree._asdict(),
        "attention": exact,
        "predictions": predictions,
        **accepted._asdict(),
        "gathered": reference.gather_path(logits, accepted.path, n),
        **{f"kv.{i}": buffer for i, buffer in enumerate(moved)},
    }
    return case_of(arguments, results)


CASES = {
    "build-default": lambda: drawn_build(10, 4, 7, 16, 16),
    "build-mid": lambda: drawn_build(11, 3, 7, 32, 32),
    "build-wide": lambda: drawn_build(12, 2, 15, 127, 127),
    "build-underfull": build_underfull,
    "build-chain": lambda: drawn_build(15, 3, 7, 1, 16),
    "build-budget-64": lambda: drawn_build(16, 3, 7, 64, 64),
    "build-depth-15": lambda: drawn_build(17, 3, 15, 32, 48, peak=12.0),
    "build-batch-64": lambda: drawn_build(18, 64, 7, 16, 16),
    "build-ties": build_ties,
    "build-minus-infinity": build_minus_infinity,
    "build-token-0": build_token_0,
    "attention-h8-prefix-0": lambda: attention_case(22, 8, [0, 0], 8),
    "attention-h16-prefix-1": lambda: attention_case(23, 16, [1, 0], 16, k=1, levels=15),
    "attention-h64-prefix-128": lambda: attention_case(24, 64, [128], 12),
    "attention-h64-prefix-2048": lambda: attention_case(25, 64, [2048], 8),
    "attention-h8-prefix-2048": lambda: attention_case(26, 8, [2048], 32),
    "attention-h9-ragged": lambda: attention_case(27, 9, [37, 0, 500], 20, levels=3, k=2),
    "accept-lengths": accept_lengths,
    "accept-early-stop": accept_early_stop,
    "accept-whole-chain": accept_whole_chain,
    "accept-malformed": accept_malformed,
    "accept-brothers": accept_brothers,
    "accept-batch-64": accept_batch_64,
    "topk-f32": lambda: topk_case(40, 6, 5003, 64, np.float32),
    "topk-bf16": lambda: topk_case(41, 5, 4096, 127, ml_dtypes.bfloat16),
    "merge-shards": merge_shards,
    "mask-two-words": lambda: mask_case(43, 127, [0, 40, -3], 0),
    "mask-cut": lambda: mask_case(44, 20, [17, 9], 300),
    "gather-f32": lambda: gather_case(45, 4, 33, 8, 37, np.float32),
    "gather-bf16": lambda: gather_case(46, 4, 33, 8, 768, ml_dtypes.bfloat16),
    "compact-scattered": compact_scattered,
    "compact-overlapping": compact_overlapping,
    "compact-malformed": compact_malformed,
    "compose-step": compose_step,
}


def write_all(folder: Path) -> list[Path]:
    """Writes every case; returns the files in order."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, make in CASES.items():
        paths.append(folder / f"{name}.kdtr")
        kdtr.write(paths[-1], make())
    return paths


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: suite_cases.py FOLDER")
    print(f"{len(write_all(Path(sys.argv[1])))} cases in {sys.argv[1]}")
