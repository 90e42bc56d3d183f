"""Trains a tiny target and its DFlash drafter.

    python train.py --arch mla --corpus CORPUS --out OUT

writes OUT/target and OUT/draft. Each phase ends after its number of steps or its minutes,
whichever comes first; the learning rate follows whichever is further along.
"""

import argparse
import json
import math
import shutil
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from evaluate import measure, report
from models import BLOCK, TARGETS, Draft, Target, draft_config, export, load
from transformers import AutoTokenizer

EOS = 2
BIAS_RATE = 1e-3
DECAY = 0.8  # a late position of a block counts only if all earlier ones are right
PROMPT_LENGTHS = [16, 24, 40, 64, 96, 128, 160, 200]


class Schedule:
    """Linear warm-up, then a cosine down to 2 % of the peak; also the end of a phase."""

    def __init__(self, optimizer, peak, steps, minutes):
        self.optimizer, self.peak, self.steps, self.seconds = optimizer, peak, steps, minutes * 60
        self.start, self.step = time.time(), 0

    def running(self):
        done = max(self.step / self.steps, (time.time() - self.start) / self.seconds)
        if done >= 1:
            return False
        warm = min(1.0, (self.step + 1) / min(200, 1 + self.steps // 10))
        rate = self.peak * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.step += 1
        return True


def make_optimizer(model, weight_decay):
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)


def windows(tokens, count, length):
    start = torch.randint(len(tokens) - length, (count, 1), device=tokens.device)
    return tokens[start + torch.arange(length, device=tokens.device)]


def train_target(target, splits, args, autocast):
    optimizer = make_optimizer(target, 0.1)
    schedule = Schedule(optimizer, 2e-3, args.target_steps, args.target_minutes)
    routers = [m for m in target.modules() if hasattr(m, "balance")]
    target.train()
    while schedule.running():
        batch = windows(splits["train"], args.batch, 513)
        with autocast():
            logits, _ = target(batch[:, :-1], dropout=0.1)
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(target.parameters(), 1.0)
        optimizer.step()
        if schedule.step % 200 == 0:
            worst = max([float(r.load.max() / r.load.mean()) for r in routers], default=0)
            seconds = time.time() - schedule.start
            print(
                f"target step {schedule.step} {seconds:.0f}s loss {loss.item():.3f} "
                f"held-out {validate(target, splits, autocast):.3f} busiest expert {worst:.2f}",
                flush=True,
            )
        for router in routers:
            router.balance(BIAS_RATE)
    target.eval()
    # The drafter has to see the states of the published, rounded weights.
    with torch.no_grad():
        for p in target.parameters():
            p.copy_(p.bfloat16())


@torch.no_grad()
def validate(target, splits, autocast):
    target.eval()
    batch = splits["heldout"][: 64 * 513].view(64, 513)
    with autocast():
        logits, _ = target(batch[:, :-1])
    target.train()
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten()).item()


@torch.no_grad()
def write_greedily(target, splits, args, autocast):
    """[(prompt length, tokens [N, T])]: the target's own text, from seen and unseen documents."""
    texts = []
    start = time.time()
    for length in PROMPT_LENGTHS:
        parts = [windows(splits[s], args.texts // 2, length) for s in ("train", "draft")]
        with autocast():
            texts.append((length, target.generate(torch.cat(parts), args.written)))
    print(f"wrote {len(texts)} x {args.texts} texts in {time.time() - start:.0f}s", flush=True)
    return texts


def draft_batch(target, splits, texts, args):
    """Tokens, target features, anchors, labels and their validity for one step."""
    device = splits["train"].device
    own = torch.rand(()) < 0.8
    if own:
        length, pool = texts[torch.randint(len(texts), ()).item()]
        tokens = pool[torch.randint(len(pool), (args.draft_batch,), device=device)]
    else:
        # Corpus text carries the drafter to longer contexts than the prompts of the own texts.
        length, tokens = 8, windows(splits["train"], args.draft_batch // 2, 512)
    with torch.no_grad():
        logits, states = target(tokens)
        layer_ids = draft_config(args.arch)["dflash_config"]["target_layer_ids"]
        features = target.features(states, layer_ids)
    span = tokens.shape[1] - BLOCK + 1 - length
    anchors = length + torch.rand(len(tokens), span, device=device).topk(args.anchors).indices
    at = anchors[..., None] + torch.arange(1, BLOCK, device=device)
    follow = tokens[:, None].expand(-1, args.anchors, -1).gather(2, at)
    if own:
        labels = follow
        right = torch.ones_like(labels, dtype=torch.bool)
    else:
        labels = logits.argmax(-1)[:, None].expand(-1, args.anchors, -1).gather(2, at - 1)
        right = labels == follow
    # A label stands only while the text before it is what the target itself would write,
    # and until the text has ended.
    begun = tokens.gather(1, anchors)[..., None]
    before = torch.cat([begun != EOS, right[..., :-1] & (follow[..., :-1] != EOS)], dim=-1)
    return tokens, features, anchors, labels, before.cumprod(-1)


def train_draft(target, draft, splits, texts, args, autocast):
    optimizer = make_optimizer(draft, 0.01)
    schedule = Schedule(optimizer, 2e-3, args.draft_steps, args.draft_minutes)
    decay = DECAY ** torch.arange(BLOCK - 1, device=splits["train"].device)
    draft.train()
    while schedule.running():
        with autocast():
            tokens, features, anchors, labels, valid = draft_batch(target, splits, texts, args)
            logits = draft(target, features, tokens, anchors)
        loss = F.cross_entropy(logits.float().flatten(0, 2), labels.flatten(), reduction="none")
        weight = decay * valid
        loss = (loss.view_as(weight) * weight).sum() / weight.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        if schedule.step % 200 == 0:
            hit = ((logits.argmax(-1) == labels) * valid).cumprod(-1).sum(-1).float().mean()
            seconds = time.time() - schedule.start
            print(
                f"draft step {schedule.step} {seconds:.0f}s loss {loss.item():.3f} "
                f"committed {1 + hit.item():.2f}",
                flush=True,
            )
    draft.eval()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", choices=TARGETS, required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--target", type=Path, help="a trained target: train the drafter only")
    parser.add_argument("--batch", type=int, default=64, help="windows of 512 tokens a target step")
    parser.add_argument("--target-steps", type=int, default=3500)
    parser.add_argument("--target-minutes", type=float, default=60)
    parser.add_argument("--texts", type=int, default=4096, help="own texts for each prompt length")
    parser.add_argument("--written", type=int, default=80, help="tokens of each own text")
    parser.add_argument("--draft-batch", type=int, default=256)
    parser.add_argument("--anchors", type=int, default=16)
    parser.add_argument("--draft-steps", type=int, default=8000)
    parser.add_argument("--draft-minutes", type=float, default=60)
    parser.add_argument("--check", type=int, default=48, help="prompts measured at the end")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device(args.device)
    splits = {
        s: torch.from_numpy(np.load(args.corpus / f"{s}.npy").astype(np.int64)).to(device)
        for s in ("train", "draft", "heldout")
    }

    def autocast():
        return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")

    def save(model, config, name):
        export(model, config, args.out / name)
        for file in (args.corpus / "tokenizer").iterdir():
            shutil.copy(file, args.out / name)

    if args.target:
        target = load(args.target).to(device)
    else:
        target = Target(TARGETS[args.arch]).to(device)
        train_target(target, splits, args, autocast)
    save(target, target.c, "target")
    target.requires_grad_(False)

    draft = Draft(draft_config(args.arch)).to(device)
    texts = write_greedily(target, splits, args, autocast)
    train_draft(target, draft, splits, texts, args, autocast)
    save(draft, draft.c, "draft")

    tokenizer = AutoTokenizer.from_pretrained(args.corpus / "tokenizer")
    lines = (args.corpus / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[: args.check]
    prompts = [tokenizer.encode(json.loads(line)["text"]) for line in lines]
    report(*measure(target, draft, prompts, 64))


if __name__ == "__main__":
    main()
