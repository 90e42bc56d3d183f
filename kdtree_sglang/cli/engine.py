"""`kdtree-sglang engine`: the FP32 engine on a checkpoint, step by step.

Greedy decoding of a DeepSeek-V3 target in float32, without SGLang: token by token (ar), by a chain
of a DFlash drafter's tokens, or by a tree of them. All three print one text. EOS does not end it.

With --save each step's tensors go to FOLDER/step-0001.kdtr and so on; `kdtree-sglang kdtr` reads
them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from kdtree_sglang import engine, kdtr


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    try:
        target = engine.Target.load(options.model, options.device)
        draft = engine.Draft.load(options.draft, target) if options.draft else None
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        report = _Report(tokenizer, options.mode, options.save)
        prompts = [tokenizer.encode(prompt) for prompt in options.prompt]
        texts = engine.generate(
            target,
            prompts,
            options.max_new_tokens,
            mode=options.mode,
            draft=draft,
            budget=options.budget,
            page_size=options.page_size,
            on_step=report.step,
        )
    except (ValueError, OSError) as error:
        print(f"kdtree-sglang engine: {error}", file=sys.stderr)
        return 2
    for number, text in enumerate(texts):
        print(f"\nprompt {number}: {len(text.tokens)} tokens, {_rate(text)}")
        print(options.prompt[number] + tokenizer.decode(text.tokens))
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="kdtree-sglang engine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder of the target: config, safetensors")
    add("--draft", type=Path, help="folder of its DFlash drafter")
    add("--prompt", action="append", required=True, help="may be repeated: decoded as one batch")
    add("--mode", choices=engine.MODES, help="default: tree with a draft, else ar")
    add("--budget", type=int, default=16, help="tree nodes besides the root (default 16)")
    add("--max-new-tokens", type=int, default=64)
    add("--page-size", type=int, default=64, help="tokens of a page of the caches (default 64)")
    add("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    add("--save", type=Path, metavar="FOLDER", help="write every step's tensors as KDTR")
    options = parser.parse_args(argv)
    options.mode = options.mode or ("tree" if options.draft else "ar")
    if options.mode != "ar" and options.draft is None:
        parser.error(f"--mode {options.mode} needs --draft")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU")
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return options


class _Report:
    """Prints each step, and saves it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, mode: str, folder: Path | None):
        self._tokenizer, self._mode, self._folder = tokenizer, mode, folder
        self._steps = 0
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.glob("step-*.kdtr")):
                raise ValueError(
                    f"--save {folder} has steps of an earlier run; name another folder"
                )

    def step(self, step: engine.Step) -> None:
        self._steps += 1
        for row, request in enumerate(step.requests.tolist()):
            tokens = step.committed[row]
            print(
                f"step {self._steps:3}  prompt {request}  {self._drafted(step, row)}"
                f"{self._tokenizer.decode(tokens)!r}"
            )
        if self._folder is not None:
            path = self._folder / f"step-{self._steps:04}.kdtr"
            tensors = {"requests": step.requests, **step.tensors}
            kdtr.write(path, {name: tensor.cpu().numpy() for name, tensor in tensors.items()})

    def _drafted(self, step: engine.Step, row: int) -> str:
        if self._mode == "ar":
            return ""
        accepted = len(step.committed[row]) - 1
        if self._mode == "chain":
            drafts = step.tensors["drafts"].shape[1]
        else:
            drafts = int(step.tensors["num_nodes"][row]) - 1
        return f"accepted {accepted} of {drafts} drafts  "


def _rate(text: engine.Generation) -> str:
    if not text.committed:
        return "no step"
    return f"{sum(text.committed) / len(text.committed):.2f} a step in {len(text.committed)} steps"


if __name__ == "__main__":
    raise SystemExit(main())
