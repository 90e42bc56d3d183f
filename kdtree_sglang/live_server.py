"""A real SGLang server as a context manager, and a small HTTP client for it.

    with LiveServer(["--model-path", target, *serving_flags()], log_path=log) as server:
        print(server.generate("Once upon a time", {"max_new_tokens": 32}).text)

Used by the demo, the live tests and the A/B tools. The server runs in its own process group, so
stopping it reaches the scheduler and detokenizer processes too, also when the start fails.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from kdtree_sglang import cpu_sglang

Prompt = str | Sequence[int]

_TAIL_LINES = 40
_POLL_SECONDS = 0.5
_STOP_SECONDS = 20.0

# Proxy settings of the environment must not catch requests to this machine.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerError(RuntimeError):
    """The server did not start, died, or answered with an error."""


def detect_device() -> str:
    """`"cuda"` where PyTorch finds a GPU, else `"cpu"`."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def serving_flags(
    device: str | None = None, dtype: str = "bfloat16", attention_backend: str = "triton"
) -> list[str]:
    """The flags that run SGLang on this machine, for greedy requests.

    On a GPU nothing is compiled or captured that greedy requests never reach: it would take minutes
    of every first start.

    Args:
        device: `"cuda"` or `"cpu"`; detected when None.
        dtype: the model's type on a GPU, where SGLang's norms know no fp32. A CPU always computes
            in fp32.
        attention_backend: on a GPU; a CPU has `torch_native` only.
    """
    if (device or detect_device()) == "cpu":
        return cpu_sglang.server_flags()
    return [
        *("--attention-backend", attention_backend, "--dtype", dtype),
        *("--sampling-backend", "pytorch", "--grammar-backend", "none"),
        "--disable-prefill-cuda-graph",
    ]


def free_port() -> int:
    """A TCP port that nobody listens on right now.

    Drawn below the ephemeral range (32768 and up on Linux): a server binds its port only after it
    has loaded, and until then any outgoing connection could take an ephemeral one.
    """
    for port in random.sample(range(20000, 31000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise ServerError("no free port between 20000 and 31000")


@dataclass(frozen=True)
class Generation:
    """One answer of `/generate`, complete or, while streaming, so far."""

    ids: list[int]
    text: str
    meta: dict[str, Any] = field(repr=False)

    @property
    def completion_tokens(self) -> int:
        return self.meta["completion_tokens"]

    @property
    def cached_tokens(self) -> int:
        return self.meta["cached_tokens"]

    @property
    def verify_steps(self) -> int:
        """Target forwards after the prefill; without speculation one a token."""
        steps = self.meta.get("spec_verify_ct")
        return self.completion_tokens - 1 if steps is None else steps

    @property
    def finish_reason(self) -> dict[str, Any] | None:
        return self.meta["finish_reason"]


def accept_length(generations: Iterable[Generation]) -> float:
    """Tokens that an average verify step committed, bonus included.

    The first token of an answer comes from the prefill and counts for no step.
    """
    generations = list(generations)
    steps = sum(g.verify_steps for g in generations)
    return sum(g.completion_tokens - 1 for g in generations) / steps if steps else float("nan")


# Nats by which the target may prefer its own token to the one an answer took instead, in bf16. The
# logits of both tokens, in two forwards of different shape, are each off by up to about one step:
# 0.125 for a logit of 16 to 32. A wrong mask or position leaves at gaps of whole nats.
NEAR_TIE = 0.5
# Ask for this many `top_logprobs_num`: more than two tokens can tie.
TOP_LOGPROBS = 5


def gap_where_it_leaves(answer: Generation, scored: Generation) -> float:
    """Nats between the expected token and the one `answer` has where the two first differ.

    Infinite where it is no near tie at all: the token is not among the best, or one of the two
    answers is only longer, which no rounding explains.

    Args:
        scored: the expected answer, requested with `return_logprob` and `top_logprobs_num`.
    """
    differing = (
        at for at, (a, b) in enumerate(zip(answer.ids, scored.ids, strict=False)) if a != b
    )
    at = next(differing, None)
    if at is None:
        return float("inf")
    scores = {token: score for score, token, *_ in scored.meta["output_top_logprobs"][at]}
    return scores[scored.ids[at]] - scores.get(answer.ids[at], float("-inf"))


class LiveServer:
    """`python -m sglang.launch_server` with the given flags, from `with` to its end.

    Args:
        flags: everything but host and port.
        log_path: where the server's output goes.
        device: `"cuda"` or `"cpu"`; detected when None. `"cpu"` adds the stand-ins' environment;
            the matching flags come from `serving_flags`.
        env: further environment variables.
        start_timeout: seconds until `/health_generate` must have answered.
    """

    def __init__(
        self,
        flags: Sequence[str],
        *,
        log_path: Path | str,
        device: str | None = None,
        env: dict[str, str] | None = None,
        start_timeout: float = 600.0,
    ):
        self.flags = list(flags)
        self.log_path = Path(log_path)
        self.device = device or detect_device()
        self.start_timeout = start_timeout
        self.start_seconds = float("nan")
        self._env = dict(env or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    # Life cycle.

    def __enter__(self) -> LiveServer:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Starts the server and waits until it has generated a token."""
        if self._process is not None:
            raise ServerError("this server is already running")
        environment = {**os.environ, **self._env}
        if self.device == "cpu":
            environment.update(cpu_sglang.environment())
        self._port = free_port()
        command = [sys.executable, "-m", "sglang.launch_server", *self.flags]
        command += ["--host", "127.0.0.1", "--port", str(self._port)]
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        begin = time.monotonic()
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        try:
            self._wait_until_healthy(begin + self.start_timeout)
        except BaseException:
            self.stop()
            raise
        self.start_seconds = time.monotonic() - begin

    def _wait_until_healthy(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            self._require_alive()
            try:
                self._request("/health_generate", timeout=30.0).close()
                return
            except (urllib.error.URLError, OSError):
                # Not listening yet, or 503 while it warms up.
                time.sleep(_POLL_SECONDS)
        raise ServerError(f"no healthy server after {self.start_timeout:.0f} s\n{self.log_tail()}")

    def stop(self) -> None:
        """Ends the whole process group and reaps it; does nothing when it is not running."""
        process, self._process = self._process, None
        if process is None:
            return
        for sign, patience in ((signal.SIGTERM, _STOP_SECONDS), (signal.SIGKILL, _STOP_SECONDS)):
            _signal_group(process.pid, sign)
            deadline = time.monotonic() + patience
            while time.monotonic() < deadline:
                # The group outlives its leader while scheduler or detokenizer still run.
                if process.poll() is not None and not _group_lives(process.pid):
                    return
                time.sleep(0.05)
        raise ServerError(f"process group {process.pid} survived SIGKILL")

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _require_alive(self) -> None:
        if self._process is None:
            raise ServerError("this server is not running")
        status = self._process.poll()
        if status is not None:
            raise ServerError(f"the server exited with status {status}\n{self.log_tail()}")

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def log(self) -> str:
        """Everything the server has printed."""
        return self.log_path.read_text(errors="replace")

    def log_tail(self) -> str:
        """The log's end, preceded by the errors it mentions: the cause often scrolls away."""
        lines = self.log().splitlines()
        tail = lines[-_TAIL_LINES:]
        errors = [line for line in lines[: -len(tail)] if _names_an_error(line)]
        parts = [f"--- {self.log_path}"]
        if errors:
            parts += ["errors further up:", *errors[-_TAIL_LINES:], "..."]
        return "\n".join(parts + tail)

    # Client.

    def generate(
        self,
        prompt: Prompt,
        sampling: dict[str, Any] | None = None,
        *,
        rid: str | None = None,
        timeout: float = 600.0,
        **fields: Any,
    ) -> Generation:
        """One complete answer; greedy unless `sampling` sets a temperature.

        Args:
            prompt: text or token ids.
            sampling: SGLang's sampling parameters.
            rid: a name of the request's own, for `abort`.
            timeout: seconds.
            **fields: further fields of the request, such as `return_logprob`.
        """
        body = _generate_body(prompt, sampling, rid, fields)
        with self._request("/generate", body, timeout=timeout) as response:
            return _parse(json.load(response))

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        sampling: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        *,
        concurrency: int = 16,
        on_done: Callable[[Generation], None] | None = None,
        timeout: float = 600.0,
        **fields: Any,
    ) -> list[Generation]:
        """Answers in the order of the prompts, up to `concurrency` requests at once.

        Args:
            prompts: texts or token ids.
            sampling: parameters for all, or one dictionary a prompt.
            concurrency: requests in flight.
            on_done: called in this thread whenever an answer is complete.
            timeout: seconds a request.
            **fields: further fields of every request.
        """
        same_for_all = sampling is None or isinstance(sampling, dict)
        each = [sampling] * len(prompts) if same_for_all else sampling
        answers: list[Generation | None] = [None] * len(prompts)
        with ThreadPoolExecutor(concurrency) as pool:
            futures = {
                pool.submit(self.generate, prompt, parameters, timeout=timeout, **fields): index
                for index, (prompt, parameters) in enumerate(zip(prompts, each, strict=True))
            }
            try:
                for future in as_completed(futures):
                    answers[futures[future]] = answer = future.result()
                    if on_done is not None:
                        on_done(answer)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [answer for answer in answers if answer is not None]

    def stream(
        self,
        prompt: Prompt,
        sampling: dict[str, Any] | None = None,
        *,
        rid: str | None = None,
        timeout: float = 600.0,
    ) -> Iterator[Generation]:
        """The answer as it grows, one event at a time, each as the server sent it."""
        body = _generate_body(prompt, sampling, rid, {"stream": True})
        with self._request("/generate", body, timeout=timeout) as response:
            for line in response:
                payload = line.decode().strip().removeprefix("data:").strip()
                if payload and payload != "[DONE]":
                    yield _parse(json.loads(payload))

    def abort(self, rid: str = "", *, abort_all: bool = False) -> None:
        """Aborts one request, or all of them."""
        body = {"rid": rid, "abort_all": abort_all}
        self._request("/abort_request", body, timeout=30.0).close()

    def flush_cache(self) -> None:
        """Empties the radix cache; the server refuses while requests run."""
        self._request("/flush_cache", {}, timeout=60.0).close()

    def server_info(self) -> dict[str, Any]:
        """`/server_info`: the resolved arguments and `internal_states`."""
        with self._request("/server_info", timeout=60.0) as response:
            return json.load(response)

    def get(self, path: str, timeout: float = 60.0) -> Any:
        """The JSON answer of any other GET endpoint."""
        with self._request(path, timeout=timeout) as response:
            return json.load(response)

    def _request(self, path: str, body: dict[str, Any] | None = None, *, timeout: float) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {} if data is None else {"Content-Type": "application/json"}
        request = urllib.request.Request(self.base_url + path, data=data, headers=headers)
        try:
            return _opener.open(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            if path == "/health_generate":
                raise
            detail = error.read().decode(errors="replace")
            raise ServerError(f"{path}: HTTP {error.code}: {detail}") from error
        except OSError:
            # A refused connection mostly means a crash, whose cause is in the log.
            if path != "/health_generate":
                self._require_alive()
            raise


def _generate_body(
    prompt: Prompt, sampling: dict[str, Any] | None, rid: str | None, fields: dict[str, Any]
) -> dict[str, Any]:
    body: dict[str, Any] = {"sampling_params": {"temperature": 0.0, **(sampling or {})}, **fields}
    if isinstance(prompt, str):
        body["text"] = prompt
    else:
        body["input_ids"] = list(prompt)
    if rid is not None:
        body["rid"] = rid
    return body


def _parse(answer: dict[str, Any]) -> Generation:
    if "error" in answer:
        raise ServerError(f"/generate: {answer['error']}")
    return Generation(ids=answer["output_ids"], text=answer["text"], meta=answer["meta_info"])


def _names_an_error(line: str) -> bool:
    head = line.split(":", 1)[0]
    return "ERROR" in line or head.endswith(("Error", "Exception", "Exit")) and " " not in head


def _signal_group(group: int, sign: signal.Signals) -> None:
    try:
        os.killpg(group, sign)
    except ProcessLookupError:
        pass  # already gone


def _group_lives(group: int) -> bool:
    """Whether a process of the group still runs.

    Zombies do not count: orphans stay that until process 1 reaps them, which in a container it may
    do late or never.
    """
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text(errors="replace")
        except OSError:
            continue  # ended meanwhile
        # "pid (command) state parent group ..."; the command may hold blanks and parentheses.
        state, _, member_of = stat.rpartition(")")[2].split()[:3]
        if int(member_of) == group and state not in "ZX":
            return True
    return False
