"""What ddtree-native does not serve yet gets HTTP 400 and the reason, never a greedy answer."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest
from server_support import Setup

SETUP = Setup("mla", "ddtree-native", 16, 16)
DFLASH = "serve with --speculative-algorithm DFLASH."

REFUSED = {
    "temperature": (
        {"sampling_params": {"temperature": 0.7}},
        f"temperature > 0 yet. Fix: send temperature 0, or {DFLASH}",
    ),
    "default temperature": (
        {"sampling_params": {}},
        f"temperature > 0 yet. Fix: send temperature 0, or {DFLASH}",
    ),
    "logprobs": (
        {"return_logprob": True},
        f"return_logprob (logprobs) yet. Fix: leave it out, or {DFLASH}",
    ),
    "json schema": (
        {"sampling_params": {"temperature": 0, "json_schema": '{"type": "object"}'}},
        f"a grammar (json_schema, regex, ebnf) yet. Fix: leave it out, or {DFLASH}",
    ),
    "regex": (
        {"sampling_params": {"temperature": 0, "regex": "a+"}},
        f"a grammar (json_schema, regex, ebnf) yet. Fix: leave it out, or {DFLASH}",
    ),
    "penalty": (
        {"sampling_params": {"temperature": 0, "frequency_penalty": 0.5}},
        f"penalties yet. Fix: leave them out, or {DFLASH}",
    ),
    "min_new_tokens": (
        {"sampling_params": {"temperature": 0, "min_new_tokens": 2, "max_new_tokens": 4}},
        f"min_new_tokens yet. Fix: leave it out, or {DFLASH}",
    ),
    "logit_bias": (
        {"sampling_params": {"temperature": 0, "logit_bias": {"5": 3.0}}},
        f"logit_bias yet. Fix: leave it out, or {DFLASH}",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_request_is_refused_with_its_reason(servers, name: str) -> None:
    server = servers.use(SETUP)
    body, reason = REFUSED[name]
    payload = {"text": "A list", "sampling_params": {"temperature": 0}, **body}
    request = urllib.request.Request(
        f"{server.base_url}/generate",
        data=json.dumps(payload).encode(),
        headers={"Content-Type": "application/json"},
    )
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(request, timeout=60)
    assert refusal.value.code == 400
    message = json.loads(refusal.value.read())["error"]["message"]
    assert message == f"DDTREE-NATIVE does not support {reason}"


def test_a_refused_request_leaves_the_server_serving(servers) -> None:
    server = servers.use(SETUP)
    answer = server.generate("A list", {"max_new_tokens": 8})
    assert answer.completion_tokens == 8
