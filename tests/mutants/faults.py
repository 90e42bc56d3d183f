"""Small faults, each of which a suite must notice.

A fault replaces one text, found exactly once in its file, by another.
"""

from typing import NamedTuple

# The kernel suite on the CPU versions of the ops, the same on the CUDA ones, and the tests of the
# references.
SUITE, CUDA_SUITE, REFERENCE = "kernel suite", "kernel suite on CUDA", "reference tests"


class Fault(NamedTuple):
    name: str
    text: str
    replacement: str
    file: str
    killer: str


def faults_in(folder: str, killer: str, files: dict[str, list[tuple[str, str, str]]]):
    return [
        Fault(name, text, replacement, f"{folder}/{file}", killer)
        for file, faults in files.items()
        for name, text, replacement in faults
    ]


BUILD_TREE = [
    ("tie order flipped", "other.path < path", "path < other.path"),
    ("keys in float", "  double key;\n", "  float key;\n"),
    (
        "sibling's sum reassociated",
        "const double without = item.key - static_cast<double>(row[item.rank]);\n"
        "      push({without + static_cast<double>(row[item.rank + 1]),",
        "const double step = static_cast<double>(row[item.rank + 1]) - row[item.rank];\n"
        "      push({item.key + step,",
    ),
    (
        "a sibling that is not finite enters",
        "item.rank + 1 < candidates && IsFinite(row[item.rank + 1])",
        "item.rank + 1 < candidates",
    ),
    (
        "a child that is not finite enters",
        "item.depth < depths && IsFinite(row[candidates])",
        "item.depth < depths",
    ),
    ("a root's child that is not finite enters", "if (IsFinite(log_probs[0])) {", "{"),
    ("last candidate left out", "item.rank + 1 < candidates", "item.rank + 2 < candidates"),
    ("last depth left out", "item.depth < depths &&", "item.depth + 1 < depths &&"),
    ("one node too few", "node <= budget && live > 0", "node < budget && live > 0"),
    (
        "parent mask not inherited",
        "|= tree.ancestors[item.parent * words + word];",
        "|= static_cast<int64_t>(word == item.parent / 64 ? uint64_t{1} << item.parent % 64 : 0);",
    ),
    (
        "bit of the root dropped",
        "|= tree.ancestors[item.parent * words + word];",
        "|= tree.ancestors[item.parent * words + word] & (word == 0 ? ~int64_t{1} : ~int64_t{0});",
    ),
    ("own bit always in the first word", "word == i / 64 ?", "word == 0 ?"),
    (
        "sibling link off by one",
        "tree.next_sibling[item.elder] = node;",
        "tree.next_sibling[item.elder] = node + 1;",
    ),
    ("second child is the first", "if (item.elder == 0) {", "if (item.rank <= 1) {"),
    (
        "position off by one",
        "tree.positions[node] = prefix_len + item.depth;",
        "tree.positions[node] = prefix_len + item.depth - 1;",
    ),
    (
        "unused rows have the root's mass",
        "i == 0 ? 0.0f : -std::numeric_limits<float>::infinity()",
        "0.0f",
    ),
]

TREE = [
    ("ranks below depth 9 ignored", "a.hi != b.hi ? a.hi < b.hi : a.lo < b.lo", "a.hi < b.hi"),
    (
        "NaN counts as finite",
        "(pun.bits & 0x7f800000u) != 0x7f800000u",
        "(pun.bits & 0x7fffffffu) != 0x7f800000u",
    ),
]

ACCEPT_TREE = [
    (
        "accepts past num_nodes",
        "const int end = num_nodes < nodes ? num_nodes : nodes;",
        "const int end = nodes;",
    ),
    ("accepts past the depth", "while (length < max_depth)", "while (length <= max_depth)"),
    (
        "follows a ring of brothers",
        "while (child > above && child < end)",
        "while (child > 0 && child < end)",
    ),
    ("last brother with the token wins", "found = child;\n        break;", "found = child;"),
    (
        "bonus of the node before",
        "view.predictions[row + path[length]]",
        "view.predictions[row + path[length > 0 ? length - 1 : 0]]",
    ),
    (
        "new_seq_lens without the bonus",
        "view.prefix_lens[request] + length + 1",
        "view.prefix_lens[request] + length",
    ),
    ("path ended late", "if (j > length) path[j] = -1;", "if (j > length + 1) path[j] = -1;"),
]

COMPACT_KV = [
    (
        "compacts in descending order",
        "for (int j = 1; j <= moves; ++j)",
        "for (int j = moves; j >= 1; --j)",
    ),
    ("last move left out", "for (int j = 1; j <= moves; ++j)", "for (int j = 1; j < moves; ++j)"),
    ("node N is a node", "node >= view.nodes", "node > view.nodes"),
    (
        "negative target taken",
        "move.source < 0 || move.target < 0 ||",
        "move.source < 0 ||",
    ),
    (
        "moves past the path",
        "if (moves > view.path_stride - 1) moves = view.path_stride - 1;\n",
        "",
    ),
]

GATHER_PATH = [
    (
        "rows past the end of a path left as they were",
        "0, static_cast<size_t>(row_bytes));",
        "0, 0);",
    ),
    ("row -1 is a row", "node >= 0 && node < nodes", "node >= -1 && node < nodes"),
]

DRAFT_TOPK = [
    ("tie to the larger id", "id < other.id", "id > other.id"),
    (
        "NaN counts as +inf",
        "std::isnan(value) ? -std::numeric_limits",
        "std::isnan(value) ? std::numeric_limits",
    ),
    (
        "merge ties by position",
        "std::stable_sort(entries.begin(), entries.end());",
        "std::stable_sort(entries.begin(), entries.end(),\n"
        "                   [](const auto& a, const auto& b) { return a.value > b.value; });",
    ),
    (
        "log-sum-exp in base 2",
        "*lse = static_cast<float>(static_cast<double>(greatest) + std::log(",
        "*lse = static_cast<float>(static_cast<double>(greatest) + std::log2(",
    ),
    (
        "merged log-sum-exp in base 2",
        "return static_cast<float>(static_cast<double>(greatest) + std::log(",
        "return static_cast<float>(static_cast<double>(greatest) + std::log2(",
    ),
    ("vocab_start forgotten", ".id + vocab_start", ".id"),
]

TREE_MASK = [
    ("word of node 64 and above", "words[j / 64]", "words[0]"),
    ("written past the end", "if (cell >= 0 && cell < view.size)", "if (cell >= 0)"),
    (
        "negative prefix length counts",
        "Clamp(view.prefix_lens[request], 0,",
        "Clamp(view.prefix_lens[request], -8,",
    ),
]

TREE_ATTENTION = [
    ("softmax in base 2", "std::exp(score - greatest)", "std::exp2(score - greatest)"),
    ("-inf prefix attended", "!std::isinf(lse)", "!(lse > 0 && std::isinf(lse))"),
    ("+inf prefix attended", "!std::isinf(lse)", "!(lse < 0 && std::isinf(lse))"),
    (
        "tail row does not see itself",
        ">> (j % 64) & 1) == 0) continue;",
        ">> (j % 64) & 1) == 0 || j == node) continue;",
    ),
    ("word of node 64 and above", "words[j / 64]", "words[0]"),
    (
        "prefix_lse read node-major",
        "(request * view.heads + head) * view.nodes + node",
        "(request * view.nodes + node) * view.heads + head",
    ),
    ("score without the rotary part", "i < kKeyDim; i +=", "i < kLatentDim; i +="),
    (
        "tail of the first request for all",
        "view.k_tail + request * view.nodes * kKeyDim",
        "view.k_tail",
    ),
    ("prefix out of the total", "if (has_prefix) add(static_cast<Sum>(lse), prefix_out);", ""),
]

CPU_FAULTS = faults_in(
    "csrc/include/kdtree",
    SUITE,
    {
        "build_tree.h": BUILD_TREE,
        "tree.h": TREE,
        "accept_tree.h": ACCEPT_TREE,
        "compact_kv.h": COMPACT_KV,
        "gather_path.h": GATHER_PATH,
        "draft_topk.h": DRAFT_TOPK,
        "tree_mask.h": TREE_MASK,
        "tree_attention.h": TREE_ATTENTION,
    },
)

CUDA_BUILD_TREE = [
    (
        "tie order flipped between lanes",
        "KeepGreatest(lanes, ~static_cast<uint32_t>(best_path.hi >> 32), lane)",
        "KeepGreatest(lanes, static_cast<uint32_t>(best_path.hi >> 32), lane)",
    ),
    ("tie order flipped within a lane", "path[slot] < best_path", "best_path < path[slot]"),
    (
        "-0.0 below 0.0",
        "__double_as_longlong(__dadd_rn(value, 0.0))",
        "__double_as_longlong(value)",
    ),
    (
        "lower half of the key not compared",
        "lanes = KeepGreatest(lanes, static_cast<uint32_t>(best_order), lane);\n",
        "",
    ),
    (
        "sibling's sum reassociated",
        "__dadd_rn(__dsub_rn(w, static_cast<double>(row[rank])),\n"
        "                            static_cast<double>(row[rank + 1]))",
        "__dadd_rn(w, __dsub_rn(static_cast<double>(row[rank + 1]),\n"
        "                            static_cast<double>(row[rank])))",
    ),
    ("children above 32 share a slot", "slot == (node >> 5)", "slot == 0"),
    (
        "a child that is not finite enters",
        "depth < depths && IsFinite(row[candidates])",
        "depth < depths",
    ),
    ("second word of ancestors", "above < 64 ? 0 : uint64_t{1} << (above - 64)", "0"),
    ("sibling link off by one", "s_next_sibling[elder] = i;", "s_next_sibling[elder] = i + 1;"),
    (
        "position off by one",
        "tree.positions[i] = prefix_len + tag.depth();",
        "tree.positions[i] = prefix_len + tag.depth() - 1;",
    ),
    (
        "too few slots",
        "budget <= 32   ? BuildTreeKernel<1>",
        "budget <= 48   ? BuildTreeKernel<1>",
    ),
]

CUDA_ACCEPT_TREE = [
    ("bonus of the root", "s_predictions[s_path[length]]", "s_predictions[s_path[0]]"),
    (
        "new_seq_lens without the bonus",
        "view.prefix_lens[request] + length + 1",
        "view.prefix_lens[request] + length",
    ),
    (
        "accepts past num_nodes",
        "view.num_nodes[request], view.nodes,",
        "view.nodes, view.nodes,",
    ),
    ("launched on another stream", "kAcceptTreeThreads, 0, stream>>>", "kAcceptTreeThreads>>>"),
]

CUDA_COMPACT_KV = [
    ("only the first batch of moves", "first += kCompactBatch", "first += kMaxNodes"),
    (
        "moves in descending order",
        "for (int j = 0; j < moves; ++j) {",
        "for (int j = moves - 1; j >= 0; --j) {",
    ),
    (
        "rows of 8-byte alignment moved by 16",
        "if (alignment % 16 == 0)",
        "if (alignment % 8 == 0)",
    ),
]

CUDA_GATHER_PATH = [("row 0 past the end of a path", "taken ? from[i] : Vec{}", "from[i]")]

CUDA_DRAFT_TOPK = [
    (
        "merge ties by position",
        "(other_id < id || (other_id == id && shard * k + j < i))",
        "(shard * k + j < i)",
    ),
    ("NaN kept", "return value != value ? MinusInfinity() : value;", "return value;"),
    ("log-sum-exp in base 2", "greatest + logf(sum)", "greatest + log2f(sum)"),
    ("last of the top k left out", "if (place < k) {", "if (place < k - 1) {"),
]

CUDA_TREE_ATTENTION = [
    ("+inf prefix attended", "!isinf(lse)", "lse > -infinity"),
    ("word of node 64 and above", "return 64 + bit;", "return bit;"),
    ("prefix out of the total", "MultiplyAdd(total, shrink, prefix_weight)", "total * shrink"),
    (
        "score without the rotary part",
        "i < Share::kRope; ++i) {\n        sum",
        "i < 0; ++i) {\n        sum",
    ),
]

CUDA_FAULTS = faults_in(
    "csrc/include/kdtree",
    CUDA_SUITE,
    {
        "build_tree.cuh": CUDA_BUILD_TREE,
        "accept_tree.cuh": CUDA_ACCEPT_TREE,
        "compact_kv.cuh": CUDA_COMPACT_KV,
        "gather_path.cuh": CUDA_GATHER_PATH,
        "draft_topk.cuh": CUDA_DRAFT_TOPK,
        "tree_attention.cuh": CUDA_TREE_ATTENTION,
    },
)

REFERENCE_FAULTS = faults_in(
    "kdtree_sglang/reference",
    REFERENCE,
    {
        "build_tree.py": [
            (
                "tie order flipped",
                "heapq.heappop(frontier)",
                "frontier.pop(frontier.index("
                "min(frontier, key=lambda item: (item[0], [-rank for rank in item[1]]))))",
            ),
            (
                "sibling's sum reassociated",
                "(w - lp[depth - 1][rank]) + lp[depth - 1][rank + 1]",
                "w + (lp[depth - 1][rank + 1] - lp[depth - 1][rank])",
            ),
            ("-inf enters", "if math.isfinite(lp", "if not math.isnan(lp"),
            ("last candidate left out", "if rank + 1 < candidates:", "if rank + 2 < candidates:"),
            ("last depth left out", "if depth < levels:", "if depth + 1 < levels:"),
            (
                "parent mask not inherited",
                "ancestors[b, i] |= ancestors[b, parent]",
                "ancestors[b, i, parent // 64] |= np.uint64(1 << parent % 64)",
            ),
            (
                "sibling link to itself",
                "next_sibling[b, last_child[parent]] = i",
                "next_sibling[b, i] = i",
            ),
            ("position off by one", "[:, None] + depths,", "[:, None] + depths - 1,"),
            (
                "token of the depth above",
                "ids[b, len(path) - 1, path[-1]]",
                "ids[b, len(path) - 2, path[-1]]",
            ),
        ],
        "accept_tree.py": [
            ("accepts past num_nodes", "min(int(num_nodes[b]), n)", "n"),
            (
                "accepts one level too few",
                "while length < max_depth:",
                "while length < max_depth - 1:",
            ),
            ("last brother with the token wins", "node = matches[0]", "node = matches[-1]"),
            (
                "bonus of the root",
                "bonus[b] = predictions[b, node]",
                "bonus[b] = predictions[b, 0]",
            ),
            (
                "new_seq_lens without the bonus",
                "prefix_lens + accept_len + 1",
                "prefix_lens + accept_len",
            ),
        ],
        "compact_kv.py": [
            ("last move left out", "n - 1) + 1):", "n - 1)):"),
            ("node N is a node", "1 <= node < n", "1 <= node <= n"),
        ],
        "draft_topk.py": [
            ("log-sum-exp in base 2", "finite + np.log(sums)", "finite + np.log2(sums)"),
            ("ties in any order", 'kind="stable"', 'kind="quicksort"'),
        ],
        "gather_path.py": [("row -1 is a row", "0 <= path[b, j] < n", "-1 <= path[b, j] < n")],
        "merge_topk.py": [
            (
                "ties by position",
                "np.lexsort((ids, -values), axis=-1)",
                'np.argsort(-values, axis=-1, kind="stable")',
            ),
            ("log-sum-exp in base 2", "finite + np.log(np", "finite + np.log2(np"),
        ],
        "tree_mask.py": [
            ("word of node 64 and above", "ancestors[b, i, j // 64]", "ancestors[b, i, 0]"),
            ("prefix written unasked", "if write_prefix:", "if True:"),
        ],
        "tree_attention.py": [
            ("softmax in base 2", "np.exp(terms", "np.exp2(terms"),
            ("+inf prefix attended", "if not np.isinf(lse):", "if not np.isneginf(lse):"),
            (
                "prefix out of the total",
                "weights @ values / weights.sum()",
                "weights @ values / weights[: len(seen)].sum()",
            ),
        ],
    },
)

FAULTS = CPU_FAULTS + CUDA_FAULTS + REFERENCE_FAULTS
