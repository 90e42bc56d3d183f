"""A test plug-in for SGLang: verifies each tree again in altered forms and records the logits.

Put its folder on PYTHONPATH and name a file in KDTREE_PROBE_OUT; a JSON list of records appears
there. Every record is about one decode step of a live server, on whatever device and with whatever
graphs that server runs. The step ends with the unaltered verify, so the server's text stays right.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

MAX_RECORDS = 6
_records: list[dict[str, Any]] = []


def install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("kdtree_sglang.worker.DDTreeWorker._verify", _probe, HookType.AROUND)


def _probe(verify: Callable, worker: Any, batch: Any, step: Any, tree: Any) -> Any:
    branches = int((tree.next_sibling[0] >= 0).sum())
    if branches < 2 or len(_records) >= MAX_RECORDS:
        return verify(worker, batch, step, tree)
    width = tree.tokens.shape[1]

    def logits(of: Any) -> torch.Tensor:
        out = verify(worker, batch, step, of)
        return out.logits_output.next_token_logits.float().view(step.bs, width, -1).clone()

    # Request 0 is altered; the others of its batch must not notice.
    base = logits(tree)
    nodes = int(tree.num_nodes[0])
    record = {
        "bs": step.bs,
        "nodes": nodes,
        "branches": branches,
        "scale": float(base[0, :nodes].abs().max()),
        "graph": bool(verify(worker, batch, step, tree).can_run_cuda_graph),
    }

    shuffled, new_number = _reverse_brothers(tree, nodes)
    permuted = logits(shuffled)
    record["permuted"] = _gap(permuted[0, new_number], base[0, :nodes])
    record["neighbours"] = _gap(permuted[1:], base[1:])

    node = _poison_target(tree, nodes)
    sees = _sees(tree, nodes, node)
    vocabulary = base.shape[-1]
    other = tree._replace(tokens=tree.tokens.clone())
    other.tokens[0, node] = (int(tree.tokens[0, node]) + vocabulary // 2) % vocabulary
    changed = logits(other)
    record["blind_to_token"] = _gap(changed[0, :nodes][~sees], base[0, :nodes][~sees])
    record["sees_token"] = _gap(changed[0, :nodes][sees], base[0, :nodes][sees])

    if not base.is_cuda:
        with _poisoned_embedding(worker, row=node):
            poisoned = logits(tree)
        record["blind_to_nan"] = _gap(poisoned[0, :nodes][~sees], base[0, :nodes][~sees])
        record["nan_descendants"] = bool(poisoned[0, :nodes][sees].isnan().all())
    else:
        with _without_graphs(worker):
            record["eager"] = _gap(logits(tree)[0, :nodes], base[0, :nodes])

    _records.append(record)
    Path(os.environ["KDTREE_PROBE_OUT"]).write_text(json.dumps(_records))
    return verify(worker, batch, step, tree)


def _gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Greatest absolute difference; NaN anywhere counts as infinite."""
    if not found.numel():
        return 0.0
    gap = (found - expected).abs()
    return float("inf") if bool(gap.isnan().any()) else float(gap.max())


def _reverse_brothers(tree: Any, nodes: int) -> tuple[Any, torch.Tensor]:
    """The same tree of request 0 with every list of brothers reversed, and old -> new numbers."""
    parents = tree.parents[0, :nodes].tolist()
    children: dict[int, list[int]] = {}
    for node in range(1, nodes):
        children.setdefault(parents[node], []).append(node)
    order = [0]
    for node in order:
        order.extend(reversed(children.get(node, [])))
    device = tree.tokens.device
    old = torch.tensor(order, device=device)
    new_number = torch.empty_like(old)
    new_number[old] = torch.arange(nodes, device=device)

    fields = {name: getattr(tree, name).clone() for name in tree._fields}
    for name in ("tokens", "depths", "positions", "log_mass"):
        fields[name][0, :nodes] = fields[name][0, old]
    moved = new_number.tolist()
    words = torch.zeros((nodes, fields["ancestors"].shape[2]), dtype=torch.int64)
    for node in range(nodes):
        walk = node
        while walk >= 0:
            bit = moved[walk]
            words[moved[node], bit // 64] |= _signed(1 << (bit % 64))
            walk = parents[walk]
    fields["ancestors"][0, :nodes] = words.to(device)
    # The walk's links are not renumbered: nothing but the verify sees this tree.
    return tree._replace(**fields), new_number


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def _poison_target(tree: Any, nodes: int) -> int:
    """The last node that has a child, so that something does see it; else the last node."""
    with_child = (tree.next_token[0, :nodes] >= 0).nonzero().flatten().tolist()
    return with_child[-1] or nodes - 1


def _sees(tree: Any, nodes: int, node: int) -> torch.Tensor:
    """Which of the nodes have `node` on their path, `[nodes]` bool."""
    return (tree.ancestors[0, :nodes, node // 64] >> (node % 64)) & 1 == 1


@contextlib.contextmanager
def _poisoned_embedding(worker: Any, row: int) -> Iterator[None]:
    """NaN for one row of the verify: its KV is NaN in every layer."""

    def poison(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[row] = float("nan")
        return output

    embedding = worker.target_worker.model_runner.model.get_input_embeddings()
    handle = embedding.register_forward_hook(poison)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def _without_graphs(worker: Any) -> Iterator[None]:
    runner = worker.model_runner.decode_cuda_graph_runner
    if runner is None:
        yield
        return
    stock = runner.can_run_graph
    runner.can_run_graph = lambda *args, **kwargs: False
    try:
        yield
    finally:
        runner.can_run_graph = stock
