"""Acceptance of a drafter on greedy text, offline and in fp32.

    python evaluate.py --pair ../mla --prompts ../prompts.jsonl

Verification of greedy text never changes it, so the target writes the continuation once, the
drafter proposes a block at every position, and the steps of a server are replayed on these.
"""

import argparse
import heapq
import json
from pathlib import Path

import torch
from models import BLOCK, load
from transformers import AutoTokenizer

EOS = 2


def tree_nodes(log_probs, budget):
    """The `budget` best paths by product of per-position probabilities, as tuples of ranks.

    log_probs [depth][rank] is sorted by rank, so a path's best unseen relatives are its first
    child and its next sibling: a heap over those two yields paths best first.
    """
    heap, nodes = [(-log_probs[0][0], (0,))], set()
    while heap and len(nodes) < budget:
        cost, path = heapq.heappop(heap)
        nodes.add(path)
        depth, rank = len(path), path[-1]
        row = log_probs[depth - 1]
        if rank + 1 < len(row):
            heapq.heappush(heap, (cost + row[rank] - row[rank + 1], path[:-1] + (rank + 1,)))
        if depth < len(log_probs):
            heapq.heappush(heap, (cost - log_probs[depth][0], path + (0,)))
    return nodes


def replay(accepted, count):
    """Tokens committed by each step, starting from the first token (which prefill gives)."""
    steps, at = [], 0
    while at < count - 1:
        steps.append(accepted[at] + 1)
        at += steps[-1]
    return steps


@torch.no_grad()
def measure(target, draft, prompts, count, budgets=()):
    """Returns the greedy texts and, for the chain and each tree budget, what each step commits."""
    device = next(target.parameters()).device
    steps, texts = {name: [] for name in ("chain", *budgets)}, []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        full = target.generate(ids, count + BLOCK)
        written = full[0, len(prompt) :].tolist()
        texts.append(written[:count])
        # The text ends at EOS; what the target writes after it is never served.
        length = written.index(EOS) + 1 if EOS in written[:count] else count
        _, states = target(full)
        features = target.features(states, draft.layer_ids)
        anchors = torch.arange(len(prompt), len(prompt) + count, device=device)[None]
        top = draft(target, features, full, anchors)[0].log_softmax(-1).topk(12, dim=-1)
        ranks, probs = top.indices.tolist(), top.values.tolist()
        accepted = {name: [] for name in steps}
        for i in range(count):
            truth = written[i + 1 : i + BLOCK]
            pairs = zip(ranks[i], truth, strict=False)
            rank = [row.index(t) if t in row else None for row, t in pairs]
            accepted["chain"].append(next((j for j, r in enumerate(rank) if r != 0), BLOCK - 1))
            for budget in budgets:
                nodes = tree_nodes(probs[i], budget)
                depth = 0
                while depth < BLOCK - 1 and tuple(rank[: depth + 1]) in nodes:
                    depth += 1
                accepted[budget].append(depth)
        for name in steps:
            steps[name] += replay(accepted[name], length)
    return steps, texts


def looping(text, n=4):
    """Share of the n-grams of a text that occurred in it before."""
    grams = [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]
    return 1 - len(set(grams)) / len(grams)


def report(steps, texts):
    # A text's last block runs past its end. A server counts only what it returns, and counts no
    # step for the first token.
    served = sum(t.index(EOS) if EOS in t else len(t) - 1 for t in texts)
    for name, values in steps.items():
        label = name if name == "chain" else f"tree of {name} drafted tokens"
        print(
            f"{label}: accept length {served / len(values):.3f} as served "
            f"({served} tokens, {len(values)} steps), {sum(values) / len(values):.3f} uncut"
        )
    histogram = [steps["chain"].count(n) for n in range(1, BLOCK + 1)]
    print(f"chain steps committing 1..{BLOCK} tokens: {histogram}")
    repeats = sorted(looping(t) for t in texts)
    print(
        f"greedy texts: {len({tuple(t) for t in texts})} distinct of {len(texts)}, "
        f"{sum(EOS in t for t in texts)} with EOS, repeated 4-grams mean "
        f"{sum(repeats) / len(repeats):.2f}, median {repeats[len(repeats) // 2]:.2f}, "
        f"{sum(r > 0.5 for r in repeats)} texts above one half"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", type=Path, required=True, help="folder with target/ and draft/")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--limit", type=int, default=None, help="use the first prompts only")
    parser.add_argument("--trees", type=int, nargs="*", default=[7, 15, 31, 63])
    parser.add_argument("--show", type=int, default=0, help="print this many continuations")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.pair / "target")
    lines = args.prompts.read_text(encoding="utf-8").splitlines()[: args.limit]
    prompts = [tokenizer.encode(json.loads(line)["text"]) for line in lines]
    steps, texts = measure(
        load(args.pair / "target"), load(args.pair / "draft"), prompts, args.tokens, args.trees
    )
    report(steps, texts)
    for prompt, text in list(zip(prompts, texts, strict=False))[: args.show]:
        print(f"--- {tokenizer.decode(prompt[-40:])}\n>>> {tokenizer.decode(text)}")


if __name__ == "__main__":
    main()
