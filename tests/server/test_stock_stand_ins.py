"""The CPU stand-ins by themselves: attention under masks and poison, the `sgl_kernel` symbols."""

import importlib.util
import subprocess
import sys

import pytest
import torch

from kdtree_sglang import cpu_sglang
from kdtree_sglang.cpu_sglang.attention import masked_attention, unpack_custom_mask


@pytest.fixture(scope="module")
def kernel():
    """The stand-in package under a name of its own, beside whatever sgl_kernel is installed."""
    path = cpu_sglang.SITE / "sgl_kernel" / "__init__.py"
    spec = importlib.util.spec_from_file_location("stand_in_sgl_kernel", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def random_case(batch=3, n=7, rows=19, heads=4, kv_heads=2, qk_dim=24, v_dim=16):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    visible = torch.rand(batch, n, rows, generator=generator) < 0.5
    visible[:, :, 0] = True
    return (
        draw(batch, n, heads, qk_dim),
        draw(batch, rows, kv_heads, qk_dim),
        draw(batch, rows, kv_heads, v_dim),
        visible,
    )


def one_query_at_a_time(query, key, value, visible, scale):
    """fp64, and hidden rows are not even read."""
    batch, n, heads, _ = query.shape
    group = heads // key.shape[2]
    output = torch.empty(batch, n, heads, value.shape[-1], dtype=torch.float64)
    for b in range(batch):
        for i in range(n):
            rows = visible[b, i].nonzero().squeeze(1)
            for h in range(heads):
                k, v = key[b, rows, h // group].double(), value[b, rows, h // group].double()
                output[b, i, h] = torch.softmax(k @ query[b, i, h].double() * scale, 0) @ v
    return output


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_equals_one_query_at_a_time(kv_heads):
    case = random_case(kv_heads=kv_heads)
    expected = one_query_at_a_time(*case, 0.3)
    torch.testing.assert_close(
        masked_attention(*case, 0.3).double(), expected, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_hidden_rows_cannot_poison(poison):
    query, key, value, visible = random_case()
    clean = masked_attention(query, key, value, visible, 0.3)
    row = 5
    key[:, row], value[:, row] = poison, poison
    poisoned = masked_attention(query, key, value, visible, 0.3)
    sees = visible[:, :, row]
    assert sees.any() and not sees.all()
    assert torch.equal(poisoned[~sees], clean[~sees])
    # A query that sees the poison must say so rather than ignore it.
    assert poisoned[sees].isnan().all()


def test_custom_mask_is_cut_by_request():
    n, prefixes = 3, torch.tensor([4, 0, 2])
    blocks = [torch.rand(n, int(prefix) + n) < 0.5 for prefix in prefixes]
    flat = torch.cat([block.reshape(-1) for block in blocks])
    visible = unpack_custom_mask(flat, prefixes, n, rows=9)
    for block, mask in zip(blocks, visible, strict=True):
        assert torch.equal(mask[:, : block.shape[1]], block)
        assert not mask[:, block.shape[1] :].any()
    with pytest.raises(ValueError, match="custom_mask has"):
        unpack_custom_mask(flat[:-1], prefixes, n, rows=9)


def test_slots_go_to_rows_and_back(kernel):
    pool = torch.zeros(4, 10, dtype=torch.int32)
    requests = torch.tensor([2, 0])
    start, end = torch.tensor([3, 0]), torch.tensor([6, 2])
    kernel.assign_req_to_token_pool_cpu(
        requests, pool, start, end, torch.tensor([11, 12, 13, 21, 22]), 10
    )
    assert pool[2].tolist() == [0, 0, 0, 11, 12, 13, 0, 0, 0, 0]
    assert pool[0].tolist() == [21, 22] + [0] * 8
    assert not pool[[1, 3]].any()

    out = torch.zeros(5, dtype=torch.int64)
    kernel.assign_extend_cache_locs_cpu(requests, pool, start, end, out, 10)
    assert out.tolist() == [11, 12, 13, 21, 22]
    window = torch.zeros(4, dtype=torch.int64)
    kernel.assign_draft_cache_locs_contiguous_cpu(
        requests, pool, torch.tensor([4, 0]), window, 10, 2, 1
    )
    assert window.tolist() == [12, 13, 21, 22]


def test_accepted_entries(kernel):
    bonus = torch.zeros(2, dtype=torch.int64)
    kernel.fill_bonus_tokens_cpu(torch.tensor([5, 6, 7, 8, 9, 10]), torch.tensor([2, 3]), bonus, 3)
    assert bonus.tolist() == [6, 10]
    slots = torch.zeros(3, dtype=torch.int64)
    kernel.fill_accept_out_cache_loc_cpu(
        torch.tensor([[0, 2, -1], [3, -1, -1]]), torch.tensor([40, 41, 42, 43]), slots
    )
    assert slots.tolist() == [40, 42, 43]


def test_rows_move_in_every_layer_even_when_they_overlap(kernel):
    layers = [torch.arange(24.0).view(6, 4), torch.arange(12, dtype=torch.int16).view(6, 2)]
    expected = [layer.clone() for layer in layers]
    sources, targets = torch.tensor([2, 3, 5]), torch.tensor([1, 2, 3])
    for layer in expected:
        layer[targets] = layer[sources]
    kernel.copy_all_layer_kv_cache_cpu(
        torch.tensor([layer.data_ptr() for layer in layers]),
        torch.tensor([layer.stride(0) * layer.element_size() for layer in layers]),
        targets,
        sources,
    )
    for layer, wanted in zip(layers, expected, strict=True):
        assert torch.equal(layer, wanted)


def test_ids_rotate(kernel):
    ids = torch.tensor([1, 2, 3, 4, 5])
    kernel.rotate_input_ids_cpu(
        ids, torch.tensor([0, 3]), torch.tensor([3, 2]), torch.tensor([[30], [50]])
    )
    assert ids.tolist() == [2, 3, 30, 5, 50]


def test_greedy_walk(kernel):
    # Root 0 with children 1 and 2; 2 has the child 3. The target wants 7, 8, then 9.
    accept_index = torch.full((1, 4), -1)
    predicts = torch.zeros(4, dtype=torch.int64)
    accepted = torch.zeros(1, dtype=torch.int64)
    kernel.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=accept_index,
        accept_token_num=accepted,
        candidates=torch.tensor([[1, 6, 7, 8]]),
        retrive_index=torch.tensor([[0, 1, 2, 3]]),
        retrive_next_token=torch.tensor([[1, -1, 3, -1]]),
        retrive_next_sibling=torch.tensor([[-1, 2, -1, -1]]),
        target_predict=torch.tensor([[7, 0, 8, 9]]),
    )
    assert accept_index.tolist() == [[0, 2, 3, -1]]
    assert accepted.tolist() == [2]
    assert predicts.tolist() == [7, 0, 8, 9]


def test_gpu_install_imports_none_of_it():
    """The stand-ins take effect through a server's environment only."""
    program = "import sys, sglang, kdtree_sglang.plugin; print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not [name for name in modules if name.startswith("kdtree_sglang.cpu_sglang")]
