"""What the op tests and the memcheck driver share: random cases, poison, comparison."""

import numpy as np
import torch

LOG_PROB_STYLES = ("smooth", "wide", "ties", "equal", "few", "special", "unsorted")


def log_probs(rng: np.random.Generator, style: str, bs: int, levels: int, k: int) -> np.ndarray:
    """[bs, levels, k] float32 in one of LOG_PROB_STYLES.

    "smooth" is what a drafter gives; "wide" takes few values from 1e-20 to 10, so that sums of
    doubles round and, in some percent of trees, only the published order of operations gives the
    published order of nodes; "ties" is "smooth" on a grid as coarse as bf16's, so that many keys
    are bit-equal; "few" has so many -inf that trees stay smaller than the budget; "special" has NaN
    and both infinities anywhere; "unsorted" may have rising keys.
    """
    raw = rng.standard_normal((bs, levels, k)) * rng.uniform(0.2, 3.0, (bs, levels, 1))
    shape = np.sort(raw, axis=-1)[..., ::-1]
    lp = shape - np.log(np.exp(shape).sum(axis=-1, keepdims=True)) - rng.uniform(0, 1)
    lp = lp.astype(np.float32)
    if style == "wide":
        palette = -np.sort(10.0 ** rng.uniform(-20, 1, 20)).astype(np.float32)
        steps = np.cumsum(rng.integers(0, 2, (bs, levels, k)), axis=-1)
        lp = palette[np.minimum(rng.integers(0, 20, (bs, levels, 1)) + steps, 19)]
    elif style == "ties":
        lp = torch.from_numpy(np.round(lp * 2) / 2 - 0.1).bfloat16().float().numpy()
    elif style == "equal":
        lp = np.broadcast_to(lp[:, :1, :1], lp.shape)
    elif style == "few":
        lp = np.where(rng.random(lp.shape) < 0.6, np.float32(-np.inf), lp)
        lp = np.sort(lp, axis=-1)[..., ::-1]
    elif style == "special":
        special = rng.choice(np.array([np.nan, np.inf, -np.inf], np.float32), lp.shape)
        lp = np.where(rng.random(lp.shape) < 0.15, special, lp)
    elif style == "unsorted":
        lp = rng.permuted(lp, axis=-1) * rng.choice([-1.0, 1.0], (bs, 1, 1)).astype(np.float32)
    return np.ascontiguousarray(lp, dtype=np.float32)


def tree_case(
    rng: np.random.Generator, style: str, bs: int, levels: int, k: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Arguments of build_tree; token ids, 0 among them, repeat across depths."""
    return (
        rng.integers(0, k + 3, (bs, levels, k)),
        log_probs(rng, style, bs, levels, k),
        rng.integers(0, k + 3, bs),
        rng.integers(0, 100_000, bs),
    )


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Overwrites with what no op writes."""
    if tensor.dtype.is_floating_point:
        return tensor.fill_(float("nan"))
    return tensor.fill_(0x5A5A5A5A if tensor.element_size() > 1 else 0x5A)


def put(device: str, *arrays: np.ndarray) -> list[torch.Tensor]:
    # A copy: torch must not write through to an array that the reference reads later.
    return [torch.from_numpy(np.array(array)).to(device) for array in arrays]


def assert_same(name: str, expected: np.ndarray, got: torch.Tensor) -> None:
    """Same dtype, shape and bits."""
    actual = got.cpu().numpy()
    assert actual.dtype == expected.dtype, f"{name}: {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{name}: {actual.shape}, expected {expected.shape}"
    same = np.ascontiguousarray(actual).view(np.uint8) == np.ascontiguousarray(expected).view(
        np.uint8
    )
    if not same.all():
        where = np.argwhere(actual != expected)[:5].tolist()
        raise AssertionError(f"{name} differs, first at {where}")


def assert_lse(expected: np.ndarray, got: torch.Tensor) -> None:
    """Infinities in the same places, the rest within 1e-5."""
    np.testing.assert_allclose(got.cpu().numpy(), expected, rtol=1e-6, atol=1e-5)


def random_path(rng: np.random.Generator, bs: int, n: int, steps: int):
    """(path, accept_len) as accept_tree gives them: ascending from 0, -1 past the end."""
    path = np.full((bs, steps), -1, np.int32)
    accept_len = rng.integers(0, min(steps, n), bs).astype(np.int32)
    for b in range(bs):
        taken = np.sort(rng.choice(np.arange(1, n), accept_len[b], replace=False))
        path[b, 0] = 0
        path[b, 1 : accept_len[b] + 1] = taken
    return path, accept_len


def buffers_with_rows(
    rng: np.random.Generator, device: str, rows: int, row_sizes: list[int], offset: int
) -> list[torch.Tensor]:
    """uint8 [rows, size] buffers that start `offset` bytes after an aligned address."""
    made = []
    for size in row_sizes:
        flat = torch.from_numpy(rng.integers(0, 256, offset + rows * size, dtype=np.uint8))
        made.append(flat.to(device)[offset:].view(rows, size))
    return made


def addresses(buffers: list[torch.Tensor], device: str) -> list[torch.Tensor]:
    return [
        torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64, device=device),
        torch.tensor([buffer.shape[1] for buffer in buffers], dtype=torch.int64, device=device),
    ]
