"""numpy references of the ops, one function each under the op's own name: the golden standard.

Written to be read against the contracts in kdtree_sglang/ops, not to be fast. They import nothing
else of the project."""

from kdtree_sglang.reference.accept_tree import accept_tree
from kdtree_sglang.reference.build_tree import build_tree
from kdtree_sglang.reference.compact_kv import compact_kv
from kdtree_sglang.reference.draft_topk import draft_topk
from kdtree_sglang.reference.gather_path import gather_path
from kdtree_sglang.reference.merge_topk import merge_topk
from kdtree_sglang.reference.tree_attention import tree_attention
from kdtree_sglang.reference.tree_mask import tree_mask

__all__ = [
    "accept_tree",
    "build_tree",
    "compact_kv",
    "draft_topk",
    "gather_path",
    "merge_topk",
    "tree_attention",
    "tree_mask",
]
