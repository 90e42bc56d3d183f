"""docs/kernels.md keeps up with the ops: names, arguments, and its example of one step."""

import inspect
import re
from pathlib import Path

import pytest
import torch

from kdtree_sglang import ops, reference

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "kernels.md").read_text()
# Heading of an op -> its section.
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## )", TEXT, re.MULTILINE | re.DOTALL))
RESULTS = {
    "draft_topk": ops.TopK,
    "build_tree": ops.Tree,
    "accept_tree": ops.Acceptance,
}
OPS = [name for name in ops.__all__ if name.removesuffix("_out") in reference.__all__]
ALLOCATORS = [name for name in ops.__all__ if name.startswith("empty_")]


def test_every_op_has_a_section():
    assert sorted(SECTIONS) == sorted(reference.__all__)
    public = {*OPS, *ALLOCATORS, "load", "ExtensionBuildError", "TopK", "Tree", "Acceptance"}
    assert public == set(ops.__all__)


@pytest.mark.parametrize("name", OPS)
def test_op_is_documented(name):
    section = SECTIONS[name.removesuffix("_out")]
    parameters = inspect.signature(getattr(ops, name)).parameters.values()
    written = [
        p.name if p.default is inspect.Parameter.empty else f"{p.name}={p.default}"
        for p in parameters
    ]
    # A long call may be broken over lines.
    assert f"{name}({', '.join(written)})" in re.sub(r"\s+", " ", section)
    first_cells = re.findall(r"^\| (?:-> )?(`.*?) \|", section, re.MULTILINE)
    listed = set(re.findall(r"`(\w+)`", " ".join(first_cells)))
    results = set(RESULTS[name]._fields) if name in RESULTS else set()
    assert {p.name for p in parameters} - {"out"} | results <= listed


@pytest.mark.parametrize("name", ALLOCATORS)
def test_allocator_is_documented(name):
    assert f"{name}({', '.join(inspect.signature(getattr(ops, name)).parameters)})" in TEXT


def test_headers_and_their_table_agree():
    headers = ROOT / "csrc" / "include" / "kdtree"
    kernels = "".join(path.read_text() for path in headers.glob("*.cuh"))
    plain = "".join(path.read_text() for path in headers.glob("*.h"))
    table = TEXT.partition("## From C++")[2]
    cells = re.findall(r"^\| (\w+)[^|]*\|([^|]*)\|([^|]*)\|$", table, re.MULTILINE)
    rows = {op: (cpu, gpu) for op, cpu, gpu in cells if op in SECTIONS}
    assert set(rows) == set(SECTIONS)
    launches = {name for _, gpu in rows.values() for name in re.findall(r"Launch\w+", gpu)}
    assert launches == set(re.findall(r"\b(Launch\w+)\(", kernels))
    for cpu, _ in rows.values():
        named = re.findall(r"`([A-Z]\w+)", cpu)
        assert named and all(re.search(rf"\b{name}\b", plain) for name in named)


def test_example_of_one_step_runs(device):
    """The text's own code over a target that agrees with the draft's likeliest tokens."""
    torch.manual_seed(0)
    bs, L, K, budget, V, h, C = 3, 4, 6, 11, 50, 2, 16
    N = budget + 1
    # Peaked, so that the likeliest path is in the tree.
    draft_logits = 8 * torch.randn(bs * L, V, device=device)
    likeliest = draft_logits.view(bs, L, V).argmax(-1)
    prefix_lens = torch.tensor([3, 0, 7], device=device)
    cache = torch.randn(bs * N, 576, device=device)
    before = cache.clone()
    slots = torch.arange(bs * N, device=device).view(bs, N)

    def target(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        depths = (positions - prefix_lens[:, None]).clamp(max=L - 1)
        return torch.nn.functional.one_hot(likeliest.gather(1, depths), V).view(bs * N, V)

    names = {
        "ops": ops,
        "bs": bs,
        "L": L,
        "K": K,
        "N": N,
        "budget": budget,
        "draft_logits": draft_logits,
        "root": torch.zeros(bs, dtype=torch.int64, device=device),
        "prefix_lens": prefix_lens,
        "q": torch.randn(bs * N, h, 576, device=device),
        "k_tail": cache,
        "prefix_out": torch.zeros(bs * N, h, 512, device=device),
        "prefix_lse": torch.full((bs, h, N), float("inf"), device=device),
        "scale": 1 / 16,
        "mask": torch.zeros(int((N * (prefix_lens + N)).sum()), dtype=torch.bool, device=device),
        "mask_indptr": torch.nn.functional.pad((N * (prefix_lens + N)).cumsum(0), (1, 0)),
        "target": target,
        "buffer_ptrs": torch.tensor([cache.data_ptr()], device=device),
        "row_bytes": torch.tensor([576 * 4], device=device),
        "slots": slots,
        "hidden": torch.randn(bs * N, C, device=device),
    }
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(code, names)

    accepted = names["accepted"]
    assert accepted.accept_len.tolist() == [L] * bs
    assert torch.equal(accepted.out_tokens[:, :L], likeliest)
    assert torch.equal(accepted.new_seq_lens, prefix_lens + L + 1)
    path = accepted.path.long()
    assert torch.equal(cache[slots[:, : L + 1]], before[slots.gather(1, path)])
    assert names["draft_hidden"].shape == (bs, L + 1, C)
    assert names["attended"].isfinite().all()
    assert names["mask"].any()
