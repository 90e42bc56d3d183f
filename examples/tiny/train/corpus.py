"""Turns a folder of text documents into a tokenizer, token arrays and held-out prompts.

    python corpus.py --source DIR --out CORPUS

CORPUS/tokenizer/     byte-level BPE that AutoTokenizer loads offline
CORPUS/train.npy      uint16 tokens of the target's documents, each `<bos> ... <eos>`
CORPUS/draft.npy      the same for documents that only the drafter sees: on them the target
                      writes as it does on unseen text, not from memory
CORPUS/heldout.npy    the same for the documents that neither sees
CORPUS/prompts.jsonl  prompts cut from held-out documents
"""

import argparse
import hashlib
import json
import random
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 2048
SPECIALS = ["<pad>", "<bos>", "<eos>", "<|MASK|>"]
PAD, BOS, EOS, MASK = range(4)
PROMPTS = 160


def split_of(name: str) -> str:
    """A document's split by its name alone, so that it survives a new corpus."""
    bucket = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 20
    return {0: "heldout", 1: "draft", 2: "draft"}.get(bucket, "train")


def train_tokenizer(texts):
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tok.train_from_iterator(texts, trainer)
    return tok


def save_tokenizer(tok, folder: Path):
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tok,
        pad_token=SPECIALS[PAD],
        bos_token=SPECIALS[BOS],
        eos_token=SPECIALS[EOS],
        mask_token=SPECIALS[MASK],
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(folder)
    # Each model folder carries a copy, and the size budget is small: drop the indentation.
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(data, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
    # transformers 5 writes the name of its new base class, which earlier versions do not know.
    path = folder / "tokenizer_config.json"
    data = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(data, indent=2) + "\n")


def cut_prompts(tok, docs, rng):
    """Prompts start at a line and end at a word, so that they tokenize as running text does."""
    prompts = []
    names = sorted(name for name, text in docs.items() if len(text) > 2000)
    while len(prompts) < PROMPTS:
        name = names[len(prompts) % len(names)]
        text = docs[name]
        starts = [0] + [i + 1 for i, c in enumerate(text) if c == "\n"]
        start = rng.choice([s for s in starts if s < len(text) - 1200 and text[s : s + 1].strip()])
        wanted = rng.randint(20, 200)
        encoded = tok.encode(text[start : start + 2000])
        if len(encoded.ids) <= wanted:
            continue
        end = start + encoded.offsets[wanted][0]
        while end < len(text) and not text[end].isspace():
            end += 1
        prompt = text[start:end].rstrip()
        length = len(tok.encode(prompt).ids)
        if 16 <= length <= 200:
            stem = Path(name).name.split(".")[0]
            prompts.append({"id": f"{stem}-{len(prompts):03d}", "text": prompt})
    return prompts


def main():
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("--source", type=Path, required=True)
    args.add_argument("--out", type=Path, required=True)
    args = args.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    docs = {
        str(p.relative_to(args.source)): p.read_text(encoding="utf-8", errors="replace")
        for p in sorted(args.source.rglob("*.txt"))
    }
    splits = {"train": {}, "draft": {}, "heldout": {}}
    for name, text in docs.items():
        splits[split_of(name)][name] = text
    tok = train_tokenizer(splits["train"].values())
    save_tokenizer(tok, args.out / "tokenizer")
    for split, part in splits.items():
        ids = []
        for encoded in tok.encode_batch(list(part.values())):
            ids += [BOS, *encoded.ids, EOS]
        np.save(args.out / f"{split}.npy", np.array(ids, dtype=np.uint16))
        print(f"{split}: {len(part)} documents, {len(ids)} tokens")
    prompts = cut_prompts(tok, splits["heldout"], random.Random(0))
    with open(args.out / "prompts.jsonl", "w", encoding="utf-8") as f:
        for p in prompts:
            f.write(json.dumps(p, ensure_ascii=False) + "\n")
    lengths = sorted(len(tok.encode(p["text"]).ids) for p in prompts)
    median = lengths[len(lengths) // 2]
    print(f"prompts: {len(prompts)}, tokens {lengths[0]}..{lengths[-1]}, median {median}")


if __name__ == "__main__":
    main()
