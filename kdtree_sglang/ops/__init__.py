"""The ops: one module each, whose docstring is the contract; CPU and CUDA behind one name.

Importing is cheap and compiles nothing; the first call of an op, or `load()`, finds or builds the
compiled library.
"""

from kdtree_sglang.ops._extension import ExtensionBuildError, load
from kdtree_sglang.ops.accept_tree import Acceptance, accept_tree, accept_tree_out, empty_acceptance
from kdtree_sglang.ops.build_tree import Tree, build_tree, build_tree_out, empty_tree
from kdtree_sglang.ops.compact_kv import compact_kv
from kdtree_sglang.ops.draft_topk import TopK, draft_topk, draft_topk_out, empty_topk
from kdtree_sglang.ops.gather_path import gather_path, gather_path_out
from kdtree_sglang.ops.merge_topk import merge_topk, merge_topk_out
from kdtree_sglang.ops.tree_attention import tree_attention, tree_attention_out
from kdtree_sglang.ops.tree_mask import tree_mask

__all__ = [
    "Acceptance",
    "ExtensionBuildError",
    "TopK",
    "Tree",
    "accept_tree",
    "accept_tree_out",
    "build_tree",
    "build_tree_out",
    "compact_kv",
    "draft_topk",
    "draft_topk_out",
    "empty_acceptance",
    "empty_topk",
    "empty_tree",
    "gather_path",
    "gather_path_out",
    "load",
    "merge_topk",
    "merge_topk_out",
    "tree_attention",
    "tree_attention_out",
    "tree_mask",
]
