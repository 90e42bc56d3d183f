"""One live SGLang server at a time, and what plain decoding answers.

A server takes far longer to start than to answer, so every configuration starts once and plain
answers are computed once a pair.

Environment: `KDTREE_TINY` names another folder than examples/tiny with `mla`, `gqa` and
`prompts.jsonl`; `KDTREE_LIVE_REPORT` a file that receives one JSON line a measured configuration.
"""

from __future__ import annotations

import functools
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdtree_sglang.live_server import (
    NEAR_TIE,
    TOP_LOGPROBS,
    Generation,
    LiveServer,
    accept_length,
    detect_device,
    gap_where_it_leaves,
    serving_flags,
)

HERE = Path(__file__).resolve().parent
TINY = Path(os.environ.get("KDTREE_TINY", HERE.parents[1] / "examples" / "tiny"))
CONCURRENCY = 16
PROMPT_COUNT = 100
NEW_TOKENS = 64

GPU_FLAGS = ["--cuda-graph-max-bs-decode", str(CONCURRENCY), "--mem-fraction-static", "0.1"]

REPORT: list[dict[str, Any]] = []


@dataclass(frozen=True)
class Setup:
    """One server configuration. `budget` and `chain` are for ddtree-native only."""

    pair: str
    algorithm: str = "plain"
    page_size: int = 1
    budget: int | None = None
    extra: tuple[str, ...] = ()
    chain: bool = False

    def __str__(self) -> str:
        budget = "" if self.budget is None else f"-budget{self.budget}"
        chain = "-chain" if self.chain else ""
        extra = "".join(flag if flag.startswith("--") else f"={flag}" for flag in self.extra)
        return f"{self.pair}-{self.algorithm}-page{self.page_size}{budget}{chain}{extra}"

    def environment(self) -> dict[str, str]:
        return {"DDTREE_FORCE_CHAIN": "1"} if self.chain else {}

    def flags(self, device: str) -> list[str]:
        folder = TINY / self.pair
        flags = ["--model-path", str(folder / "target"), *serving_flags(device)]
        flags += ["--page-size", str(self.page_size), "--skip-server-warmup"]
        flags += ["--max-running-requests", str(CONCURRENCY), "--max-total-tokens", "16384"]
        flags += GPU_FLAGS if device == "cuda" else []
        if self.algorithm != "plain":
            flags += ["--speculative-algorithm", self.algorithm]
            flags += ["--speculative-draft-model-path", str(folder / "draft")]
        if self.budget is not None:
            flags += ["--speculative-num-draft-tokens", str(self.budget + 1)]
        # Last, so that a setup can take back one of the flags above.
        return [*flags, *self.extra]


class Servers:
    """Hands out the server of a configuration and stops the one before."""

    def __init__(self, logs: Path):
        self._logs = logs
        self._device = detect_device()
        self._setup: Setup | None = None
        self._server: LiveServer | None = None
        self._answers: dict[Setup, list[Generation]] = {}

    def answers(self, setup: Setup) -> list[Generation]:
        """Greedy answers of exactly NEW_TOKENS tokens to all held-out prompts, CONCURRENCY at once.

        Measured once a session, entered in the report, and shared by the tests that compare them.
        """
        if setup not in self._answers:
            server = self.use(setup)
            begin = time.monotonic()
            # A GPU computes in bf16, and `assert_same_ids` has to know where two tokens tie.
            score = self._device == "cuda" and setup.algorithm == "plain"
            answers = server.generate_many(
                held_out_prompts(),
                {"max_new_tokens": NEW_TOKENS, "ignore_eos": True},
                concurrency=CONCURRENCY,
                **({"return_logprob": True, "top_logprobs_num": TOP_LOGPROBS} if score else {}),
            )
            self._answers[setup] = answers
            REPORT.append(
                {
                    "server": str(setup),
                    "accept_length": accept_length(answers),
                    "verify_steps": sum(answer.verify_steps for answer in answers),
                    "prompts": len(answers),
                    "seconds": time.monotonic() - begin,
                    "start_seconds": server.start_seconds,
                }
            )
        return self._answers[setup]

    def use(self, setup: Setup) -> LiveServer:
        if self._server is not None and self._setup == setup and self._server.is_running():
            return self._server
        self.close()
        log_path = self._logs / f"{setup}-{time.monotonic_ns()}.log"
        server = LiveServer(
            setup.flags(self._device),
            log_path=log_path,
            device=self._device,
            env=setup.environment(),
        )
        server.start()
        self._setup, self._server = setup, server
        return server

    def close(self) -> None:
        server, self._server, self._setup = self._server, None, None
        if server is not None:
            server.stop()


@functools.cache
def held_out_prompts() -> tuple[str, ...]:
    """The first PROMPT_COUNT prompts, of texts that neither model was trained on."""
    lines = (TINY / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = tuple(json.loads(line)["text"] for line in lines[:PROMPT_COUNT])
    assert len(prompts) == PROMPT_COUNT
    return prompts


def assert_same_ids(answers: list[Generation], expected: list[Generation]) -> None:
    """Token for token; says where each answer leaves the expected one.

    Expected answers that were scored, as `Servers.answers` does on a GPU, excuse an answer that
    leaves them at a near tie: in bf16 one row and many round differently.
    """
    assert len(answers) == len(expected)
    differences = []
    for index, (answer, wanted) in enumerate(zip(answers, expected, strict=True)):
        if answer.ids != wanted.ids:
            scored = "output_top_logprobs" in wanted.meta
            gap = gap_where_it_leaves(answer, wanted) if scored else float("inf")
            if gap <= NEAR_TIE:
                continue
            pairs = zip(answer.ids, wanted.ids, strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), "the end")
            differences.append(
                f"prompt {index} at {at}, gap {gap}: {answer.ids} instead of {wanted.ids}"
            )
    assert not differences, f"{len(differences)} of {len(answers)}:\n" + "\n".join(differences)


def assert_idle(server: LiveServer, seconds: float = 10.0) -> None:
    """Nothing runs, waits or holds KV slots; SGLang checks idle pools for leaks itself and dies."""
    deadline = time.monotonic() + seconds
    while True:
        (load,) = server.get("/v1/loads")["loads"]
        busy = {
            name: load[name]
            for name in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")
            if load[name]
        }
        if not busy:
            break
        assert time.monotonic() < deadline, f"still busy: {busy}"
        time.sleep(0.1)
    # The leak check runs in the idle loop, so give it one round before trusting the server.
    time.sleep(0.5)
    assert server.is_running(), server.log_tail()
    assert server.generate([5, 6, 7], {"max_new_tokens": 1}).completion_tokens == 1
