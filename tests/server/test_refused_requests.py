"""What ddtree-native does not serve gets HTTP 400 and the reason, never a wrong answer."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest
from server_support import Setup

SETUP = Setup("mla", "ddtree-native", 16, 16, ("--enable-return-hidden-states",))
DFLASH = "serve with --speculative-algorithm DFLASH."

REFUSED = {
    "hidden states": (
        {"return_hidden_states": True},
        # Stock DFLASH's own words under overlap.
        "DFLASH speculative decoding does not support return_hidden_states yet.",
    ),
    "sampling mask": (
        {"return_sampling_mask": True},
        f"DDTREE-NATIVE does not support return_sampling_mask yet. Fix: leave it out, or {DFLASH}",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_request_is_refused_with_its_reason(servers, name: str) -> None:
    server = servers.use(SETUP)
    body, reason = REFUSED[name]
    payload = {"text": "A list", "sampling_params": {"temperature": 0, "top_k": 8}, **body}
    request = urllib.request.Request(
        f"{server.base_url}/generate",
        data=json.dumps(payload).encode(),
        headers={"Content-Type": "application/json"},
    )
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(request, timeout=60)
    assert refusal.value.code == 400
    assert json.loads(refusal.value.read())["error"]["message"] == reason


def test_a_refused_request_leaves_the_server_serving(servers) -> None:
    server = servers.use(SETUP)
    answer = server.generate("A list", {"max_new_tokens": 8})
    assert answer.completion_tokens == 8
