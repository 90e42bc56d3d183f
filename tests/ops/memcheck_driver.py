"""Runs every op on CUDA over a range of shapes and compares with the reference.

For the memory checker, which pytest and hypothesis would only slow down; from the repository:

    PYTHONPATH=.:tests/reference compute-sanitizer --tool memcheck --error-exitcode 1 \\
        python tests/ops/memcheck_driver.py
"""

import ml_dtypes
import numpy as np
import ops_support as support
import random_cases
import torch

from kdtree_sglang import ops, reference

DEVICE = "cuda"
# (bs, L, K, budget)
TREE_SHAPES = [(1, 1, 1, 1), (3, 7, 32, 32), (5, 15, 127, 127), (2, 15, 64, 64), (64, 7, 8, 33)]
# (rows, vocabulary, k, dtype)
TOPK_SHAPES = [
    (1, 1, 1, torch.float32),
    (3, 127, 127, torch.bfloat16),
    (7, 5003, 64, torch.float16),
    (2, 151_936, 127, torch.float32),
    (5, 4099, 33, torch.bfloat16),
]

# (bs, N, heads)
ATTENTION_SHAPES = [(1, 1, 1), (2, 65, 3), (3, 9, 8), (1, 128, 5)]


def same(name: str, expected: tuple, got: tuple) -> None:
    for field, want, have in zip(expected._fields, expected, got, strict=True):
        support.assert_same(f"{name} {field}", want, have)


def check_trees(rng: np.random.Generator) -> None:
    for bs, levels, k, budget in TREE_SHAPES:
        for style in random_cases.LOG_PROB_STYLES:
            n = budget + 1
            case = random_cases.tree_case(rng, style, bs, levels, k)
            expected = reference.build_tree(*case, budget)
            tree = ops.build_tree(*support.put(DEVICE, *case), budget)
            same("build_tree", expected, tree)

            guesses = rng.integers(0, k + 3, (bs, n))
            for links in (
                (expected.next_token, expected.next_sibling),
                rng.integers(-(2**31), 2**31 - 1, (2, bs, n)).astype(np.int32),
            ):
                arrays = (expected.tokens, *links, expected.num_nodes, guesses, case[3])
                want = reference.accept_tree(*arrays, levels)
                same("accept_tree", want, ops.accept_tree(*support.put(DEVICE, *arrays), levels))

            path, accept_len = random_cases.random_path(rng, bs, n, levels + 1)
            slots = rng.permutation(bs * n).reshape(bs, n)
            buffers = support.buffers_with_rows(rng, DEVICE, bs * n, [1, 7, 48, 576, 1152], 0)
            moved = [buffer.cpu().numpy().copy() for buffer in buffers]
            reference.compact_kv(moved, slots, path, accept_len)
            ops.compact_kv(
                *support.addresses(buffers, DEVICE), *support.put(DEVICE, slots, path, accept_len)
            )
            for want, have in zip(moved, buffers, strict=True):
                support.assert_same("compact_kv", want, have)

            for width, dtype in ((1, np.float16), (37, np.float32), (768, np.float16)):
                rows = rng.standard_normal((bs * n, width)).astype(dtype)
                want = reference.gather_path(rows, path, n)
                rows_there, path_there = support.put(DEVICE, rows, path)
                support.assert_same("gather_path", want, ops.gather_path(rows_there, path_there, n))

            prefix = rng.integers(0, 40, bs)
            indptr = np.concatenate([[0], np.cumsum(n * (prefix + n))])
            for size in (int(indptr[-1]), int(indptr[-1]) // 2):
                mask = np.zeros(size, np.bool_)
                (mask_there,) = support.put(DEVICE, mask)
                reference.tree_mask(expected.ancestors, prefix, mask, indptr, True)
                ancestors, prefix_there, indptr_there = support.put(
                    DEVICE, expected.ancestors, prefix, indptr
                )
                ops.tree_mask(ancestors, prefix_there, mask_there, indptr_there, True)
                support.assert_same("tree_mask", mask, mask_there)


def check_topk(rng: np.random.Generator) -> None:
    for rows, vocab, k, dtype in TOPK_SHAPES:
        for offset in (0, 1):
            logits = torch.from_numpy(rng.standard_normal((rows, vocab)).astype(np.float32))
            logits = logits.to(dtype)
            # Rows inside a tensor that ends with the last of them: reading past one is an error.
            wide = torch.empty((rows, offset + vocab), dtype=dtype, device=DEVICE)
            wide[:, offset:] = logits.to(DEVICE)
            expected = reference.draft_topk(logits.float().numpy(), k)
            got = ops.draft_topk(wide[:, offset:], k)
            support.assert_same("draft_topk ids", expected.ids, got.ids)
            support.assert_same("draft_topk values", expected.values, got.values)
            support.assert_lse(expected.lse, got.lse)
            merged = ops.merge_topk(*(torch.stack([field, field]) for field in got), k)
            twice = [np.stack([field, field]) for field in expected]
            want = reference.merge_topk(*twice, k)
            support.assert_same("merge_topk ids", want.ids, merged.ids)
            support.assert_same("merge_topk values", want.values, merged.values)
            support.assert_lse(want.lse, merged.lse)


def check_attention(rng: np.random.Generator) -> None:
    for shape in ATTENTION_SHAPES:
        for style in random_cases.ATTENTION_MASKS:
            for dtype in (np.float32, ml_dtypes.bfloat16):
                case = random_cases.attention_case(rng, style, *shape, dtype)
                expected = reference.tree_attention(*case, random_cases.ATTENTION_SCALE)
                args = support.put(DEVICE, *case)
                got = ops.tree_attention(*args, random_cases.ATTENTION_SCALE)
                support.assert_attention(expected, got)


def main() -> None:
    rng = np.random.default_rng(0)
    check_trees(rng)
    check_topk(rng)
    check_attention(rng)
    torch.cuda.synchronize()
    print("every op equals its reference")


if __name__ == "__main__":
    main()
