"""`kdtree-sglang demo`: the same prompts plain, with stock DFLASH and with ddtree-native.

Starts the real SGLang three times on what the machine has (a GPU, else the CPU) and prints how
many tokens an average verify step committed. Speculation must not change the text: the command
fails where it does. A CPU computes in fp32, and every token must agree. A GPU computes in bf16,
where one row and many round differently: there a text may leave the plain one where the target's
own best tokens are all but tied, and the table says how many do and how wide the gaps are.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from kdtree_sglang.live_server import (
    NEAR_TIE,
    TOP_LOGPROBS,
    Generation,
    LiveServer,
    ServerError,
    accept_length,
    detect_device,
    gap_where_it_leaves,
    serving_flags,
)

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "tiny"
PAIRS = ("mla", "gqa")


@dataclass(frozen=True)
class Run:
    """One way of serving the prompts, and what came of it.

    Attributes:
        answers: of the timed pass.
        scored: the plain run's answers again, with the best tokens at each position; only where
            the target computes in bf16.
    """

    name: str
    answers: list[Generation]
    seconds: float
    scored: list[Generation] | None = None

    @property
    def tokens_per_second(self) -> float:
        return sum(answer.completion_tokens for answer in self.answers) / self.seconds

    @property
    def verify_steps(self) -> int:
        return sum(answer.verify_steps for answer in self.answers)

    def differences(self, plain: Run) -> Differences:
        """The prompts on which this run's tokens are not the plain run's."""
        found = Differences({}, {})
        for index, (mine, theirs) in enumerate(
            zip(self.answers, plain.scored or plain.answers, strict=True)
        ):
            if mine.ids != theirs.ids:
                gap = gap_where_it_leaves(mine, theirs) if plain.scored else float("inf")
                (found.near_ties if gap <= NEAR_TIE else found.wrong)[index] = gap
        return found


@dataclass(frozen=True)
class Differences:
    """Numbers of prompts whose texts differ, and the gaps in nats at which they leave."""

    near_ties: dict[int, float]
    wrong: dict[int, float]


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    prompts = _read_prompts(options.prompts, options.limit)
    device = options.device or detect_device()
    logs = Path(tempfile.mkdtemp(prefix="kdtree-demo-"))
    print(f"{options.model_path} on {device}, {len(prompts)} prompts, server logs in {logs}")

    speculative = ["--speculative-draft-model-path", str(options.draft_path)]
    modes = {
        "plain": [],
        "DFLASH": [*speculative, "--speculative-algorithm", "DFLASH"],
        "ddtree-native": [
            *speculative,
            "--speculative-algorithm",
            "ddtree-native",
            "--speculative-num-draft-tokens",
            str(options.budget + 1),
        ],
    }
    runs = []
    for name, flags in modes.items():
        try:
            runs.append(_run(name, flags, prompts, device, logs / f"{name}.log", options))
        except ServerError as error:
            print(f"\n{name}: {error}", file=sys.stderr)
            return 2

    print(_table(runs))
    status = 0
    for run in runs[1:]:
        for index, gap in run.differences(runs[0]).wrong.items():
            status = 1
            print(
                f"{run.name} differs on prompt {index}, at a gap of {gap:.2f} nats:\n"
                f"  plain: {runs[0].answers[index].text!r}\n"
                f"  {run.name}: {run.answers[index].text!r}",
                file=sys.stderr,
            )
    if status == 0 and not options.keep_logs:
        for log in logs.iterdir():
            log.unlink()
        logs.rmdir()
    return status


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kdtree-sglang demo", description=__doc__)
    add = parser.add_argument
    add("--pair", choices=PAIRS, default="mla", help="tiny model pair of examples/tiny")
    add("--model-path", type=Path, help="any other target, together with --draft-path")
    add("--draft-path", type=Path, help="its DFlash drafter")
    add("--prompts", type=Path, default=EXAMPLES / "prompts.jsonl", help='lines of {"id", "text"}')
    add("--limit", type=int, default=32, help="how many of the prompts (default 32)")
    add("--max-new-tokens", type=int, default=64)
    add("--concurrency", type=int, default=8, help="requests at once (default 8)")
    add("--budget", type=int, default=32, help="tree nodes besides the root (default 32)")
    add("--device", choices=("cuda", "cpu"), help="default: a GPU if there is one")
    add("--attention-backend", default="triton", help="on a GPU (default triton)")
    add("--page-size", type=int, default=16)
    add("--keep-logs", action="store_true", help="keep the server logs of a successful run too")
    options = parser.parse_args(argv)
    if (options.model_path is None) != (options.draft_path is None):
        parser.error("--model-path and --draft-path go together")
    if options.model_path is None:
        options.model_path = EXAMPLES / options.pair / "target"
        options.draft_path = EXAMPLES / options.pair / "draft"
    for path in (options.model_path, options.draft_path, options.prompts):
        if path is options.prompts or EXAMPLES in path.parents:
            if not path.exists():
                parser.error(f"{path} does not exist; the examples come with a source checkout")
    return options


def _read_prompts(path: Path, limit: int) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()[:limit]
    return [json.loads(line)["text"] for line in lines]


def _run(
    name: str,
    flags: list[str],
    prompts: list[str],
    device: str,
    log_path: Path,
    options: argparse.Namespace,
) -> Run:
    common = [
        "--model-path",
        str(options.model_path),
        *serving_flags(device, attention_backend=options.attention_backend),
        "--page-size",
        str(options.page_size),
        "--max-running-requests",
        str(options.concurrency),
    ]
    if device == "cuda":
        common += ["--cuda-graph-max-bs-decode", str(options.concurrency)]
    # The default pool is a share of the machine's memory, which three servers in a row would each
    # allocate for a few thousand tokens.
    longest = max(len(prompt.encode()) for prompt in prompts)
    room = options.concurrency * (longest + options.max_new_tokens + 2 * options.budget + 64)
    common += ["--max-total-tokens", str(max(8192, room))]
    sampling = {"max_new_tokens": options.max_new_tokens}
    bar = tqdm(total=len(prompts), desc=f"{name:14}", unit="prompt", leave=True)
    with bar, LiveServer(common + flags, log_path=log_path, device=device) as server:
        bar.set_postfix_str(f"server up in {server.start_seconds:.0f} s")
        # The first requests pay for lazy initialisation and must not count as speed; what they
        # leave in the radix cache must not help the measured ones.
        server.generate_many(prompts[: options.concurrency], {"max_new_tokens": 4})
        server.flush_cache()
        begin = time.monotonic()
        answers = server.generate_many(
            prompts,
            sampling,
            concurrency=options.concurrency,
            on_done=lambda _: bar.update(),
        )
        seconds = time.monotonic() - begin
        bar.close()  # before the server stops, which is no part of the progress
        scored = None
        if device == "cuda" and not flags:
            scored = server.generate_many(
                prompts,
                sampling,
                concurrency=options.concurrency,
                return_logprob=True,
                top_logprobs_num=TOP_LOGPROBS,
            )
    return Run(name, answers, seconds, scored)


def _verdict(run: Run, plain: Run) -> str:
    found = run.differences(plain)
    equal = len(run.answers) - len(found.near_ties) - len(found.wrong)
    ties = ""
    if found.near_ties:
        widest = max(found.near_ties.values())
        ties = f", {len(found.near_ties)} near ties (<= {widest:.2f} nats)"
    return f"{equal} of {len(run.answers)}{ties}"


def _table(runs: list[Run]) -> str:
    rows = [("run", "same text", "accept length", "verify steps", "tokens/s")]
    for run in runs:
        rows.append(
            (
                run.name,
                "reference" if run is runs[0] else _verdict(run, runs[0]),
                f"{accept_length(run.answers):.2f}",
                str(run.verify_steps),
                f"{run.tokens_per_second:.0f}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        " | ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    lines.insert(1, "-|-".join("-" * width for width in widths))
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
