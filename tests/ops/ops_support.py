"""What the op tests and the memcheck driver share: poison, comparison, buffers."""

import ml_dtypes
import numpy as np
import torch


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Overwrites with what no op writes."""
    if tensor.dtype.is_floating_point:
        return tensor.fill_(float("nan"))
    return tensor.fill_(0x5A5A5A5A if tensor.element_size() > 1 else 0x5A)


def put(device: str, *arrays: np.ndarray) -> list[torch.Tensor]:
    def tensor(array: np.ndarray) -> torch.Tensor:
        # A copy: torch must not write through to an array that the reference reads later.
        copy = np.array(array, order="C")
        if copy.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(copy.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(copy)

    return [tensor(array).to(device) for array in arrays]


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


def assert_attention(expected: np.ndarray, got: torch.Tensor) -> None:
    """NaN in the same places, the rest rounded once; bfloat16 sums in float32, which adds 2e-5."""
    actual = got.cpu().double().numpy()
    assert actual.shape == expected.shape
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    error = np.nan_to_num(actual - expected)
    if got.dtype == torch.float32:
        assert np.abs(error).max(initial=0.0) <= 1e-6
    else:
        assert (np.abs(error) <= 2.0**-8 * np.abs(np.nan_to_num(expected)) + 2e-5).all()


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
