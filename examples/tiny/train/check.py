"""Checks a pair against transformers: equal target logits in fp32, equal greedy text, tokenizer.

    python check.py --pair ../mla --prompts ../prompts.jsonl
"""

import argparse
import json
from pathlib import Path

import torch
from models import BLOCK, load
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=8)
    args = parser.parse_args()
    ours, draft = load(args.pair / "target"), load(args.pair / "draft")
    theirs, loading = AutoModelForCausalLM.from_pretrained(
        args.pair / "target", dtype=torch.float32, output_loading_info=True
    )
    theirs.eval()
    print({k: v for k, v in loading.items() if v} or "every tensor was found and used")
    draft_config = AutoConfig.from_pretrained(args.pair / "draft")
    print(f"draft config reads as {type(draft_config).__name__}: {draft_config.dflash_config}")
    tokenizer = AutoTokenizer.from_pretrained(args.pair / "target")
    worst, same_text, same_draft = 0.0, 0, 0
    for line in args.prompts.read_text(encoding="utf-8").splitlines()[: args.limit]:
        text = json.loads(line)["text"]
        ids = tokenizer(text, return_tensors="pt").input_ids
        assert tokenizer.decode(ids[0]) == text
        a, states = ours(ids)
        b = theirs(ids, output_hidden_states=True)
        worst = max(worst, (a - b.logits).abs().max().item())
        for ours_state, state in zip(states[:-1], b.hidden_states[1:], strict=False):
            worst = max(worst, (ours_state - state).abs().max().item())
        full = ours.generate(ids, 32)
        other = theirs.generate(ids, max_new_tokens=32, min_new_tokens=32, do_sample=False)
        # transformers forbids EOS to reach the length, so only the text before it is compared.
        end = full[0].tolist().index(2) if 2 in full[0] else full.shape[1]
        same_text += bool((full[0, :end] == other[0, :end]).all())
        # All anchors at once must draft what a server drafts with one anchor and nothing after it.
        features = ours.features(ours(full)[1], draft.layer_ids)
        first = ids.shape[1]
        anchors = torch.tensor([[first, first + 5, first + 20]])
        together = draft(ours, features, full, anchors)
        for i, at in enumerate(anchors[0].tolist()):
            alone = draft(ours, features[:, :at], full[:, : at + 1], anchors[:, i : i + 1])
            same_draft += bool((together[:, i : i + 1] - alone).abs().max() < 1e-3)
    print(f"largest difference of logits and hidden states: {worst:.2e}")
    print(f"greedy texts equal: {same_text} of {args.limit}")
    print(f"blocks of {BLOCK} equal, drafted together and alone: {same_draft} of {3 * args.limit}")


if __name__ == "__main__":
    main()
