"""The kernel suite's cases through the standalone harness and, the same files, through torch."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import ops_support as support
import pytest
import suite_cases
import torch

from kdtree_sglang import kdtr, ops

ROOT = Path(__file__).parents[2]

# A result is near the expected one within (absolute, relative).
LSE = (1e-5, 1e-6)
ATTENTION_F32 = (1e-6, 0.0)
ATTENTION_BF16_ROW = 1e-2


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("suite")
    return {path.stem: path for path in suite_cases.write_all(folder)}


def make(target: str, build: Path, *variables: str) -> Path:
    """Builds a harness into `build` by the Makefile's command for it."""
    command = ["make", "-s", "-C", str(ROOT), f"BUILD={build}", *variables, f"{build}/{target}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return build / target


def run(harness: Path, *paths: Path) -> tuple[int, list[str]]:
    command = [str(harness), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    return done.returncode, done.stdout.splitlines()


def assert_all_pass(harness: Path, paths: list[Path]) -> None:
    status, lines = run(harness, *paths)
    assert [line for line in lines if line.startswith("FAILED")] == []
    assert lines[-1] == f"{len(paths)} passed, 0 failed"
    assert len(lines) == len(paths) + 2
    assert status == 0


@pytest.fixture(scope="session")
def cpu_harness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("kernel_suite_cpu", tmp_path_factory.mktemp("harness"))


def test_suite_is_complete(files):
    kinds = [name.partition("-")[0] for name in files]
    assert {kind: kinds.count(kind) for kind in ("build", "attention", "accept", "compose")} == {
        "build": 11,
        "attention": 6,
        "accept": 6,
        "compose": 1,
    }
    assert sum(path.stat().st_size for path in files.values()) < 64 << 20


def test_cases_are_the_same_every_time(files, tmp_path):
    for name in ("build-ties", "attention-h8-prefix-0", "compose-step"):
        kdtr.write(tmp_path / name, suite_cases.CASES[name]())
        assert (tmp_path / name).read_bytes() == files[name].read_bytes()


def test_cpu_harness_passes_every_case(cpu_harness, files):
    assert_all_pass(cpu_harness, list(files.values()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_cuda_harness_passes_every_case(files, tmp_path):
    major, minor = torch.cuda.get_device_capability()
    arch = "90a" if (major, minor) == (9, 0) else f"{major}{minor}"
    harness = make("kernel_suite_cuda", tmp_path, f"CUDA_ARCHS={arch}")
    assert_all_pass(harness, list(files.values()))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_cuda_harness_builds_and_says_when_there_is_no_gpu(tmp_path):
    harness = make("kernel_suite_cuda", tmp_path, "CUDA_ARCHS=90a")
    if not torch.cuda.is_available():
        assert run(harness, tmp_path / "none.kdtr") == (77, ["no CUDA device: nothing was run"])


def changed(array: np.ndarray) -> np.ndarray:
    """The array with one defined element changed by more than any tolerance."""
    array = array.copy()
    flat = array.reshape(-1)
    at = int(np.flatnonzero(np.isfinite(flat.astype(np.float64)))[-1])
    flat[at] = flat[at] + 1 if array.dtype != np.bool_ else not flat[at]
    if array.dtype == np.float32 and array.ndim == 3:
        # A row of attention in bf16, which is compared as a whole.
        array[np.unravel_index(at, array.shape)[:-1]] += 1
    return array


@pytest.mark.parametrize(
    "name",
    ["build-default", "attention-h8-prefix-0", "accept-lengths", "topk-f32", "merge-shards",
     "mask-cut", "gather-bf16", "compact-scattered", "compose-step"],
)
def test_cpu_harness_notices_a_change_of_any_result(cpu_harness, files, tmp_path, name):
    tensors = kdtr.read(files[name])
    results = [key for key in tensors if key.startswith("out.")]
    paths = []
    for i, key in enumerate(results):
        paths.append(tmp_path / f"{name}-{i}.kdtr")
        kdtr.write(paths[-1], dict(tensors) | {key: changed(tensors[key])})
    status, lines = run(cpu_harness, *paths)
    assert status == 1
    assert lines[-1] == f"0 passed, {len(results)} failed"
    for path, key, line in zip(paths, results, lines[1:-1], strict=True):
        assert line.startswith(f"FAILED  {path.name}: {key}[")


def test_cpu_harness_names_what_is_wrong_with_a_file(cpu_harness, files, tmp_path):
    tensors = kdtr.read(files["accept-lengths"])
    missing = {key: value for key, value in tensors.items() if key != "in.tokens"}
    kdtr.write(tmp_path / "accept-missing.kdtr", missing)
    kdtr.write(tmp_path / "accept-wrong.kdtr", dict(tensors) | {"in.tokens": np.zeros(3)})
    (tmp_path / "accept-cut.kdtr").write_bytes(files["accept-lengths"].read_bytes()[:-1])
    (tmp_path / "other-op.kdtr").write_bytes(files["accept-lengths"].read_bytes())
    paths = sorted(tmp_path.glob("*.kdtr"))
    status, lines = run(cpu_harness, *paths)
    assert status == 1
    assert lines[-1] == "0 passed, 4 failed"
    assert "in.tokens" in lines[2] and "in.tokens" in lines[3]
    assert run(cpu_harness)[0] == 2


class Results:
    """Compares what an op wrote with a case's results."""

    def __init__(self, case: dict[str, np.ndarray]) -> None:
        self.case = case
        self.compared: set[str] = set()

    def expected(self, name: str) -> np.ndarray:
        self.compared.add(f"out.{name}")
        return self.case[f"out.{name}"]

    def same(self, name: str, got: torch.Tensor) -> None:
        expected = self.expected(name)
        if expected.dtype == ml_dtypes.bfloat16:
            expected, got = expected.view(np.int16), got.view(torch.int16)
        support.assert_same(name, expected, got)

    def same_fields(self, got: tuple) -> None:
        for field in got._fields:
            self.same(field, getattr(got, field))

    def near(self, name: str, got: torch.Tensor, absolute: float, relative: float) -> None:
        expected = self.expected(name).astype(np.float64)
        defined = ~np.isnan(expected)
        actual = got.double().cpu().numpy()
        assert actual.shape == expected.shape
        np.testing.assert_allclose(actual[defined], expected[defined], relative, absolute)

    def near_rows(self, name: str, got: torch.Tensor, relative: float) -> None:
        expected = self.expected(name).astype(np.float64)
        error = np.linalg.norm(got.double().cpu().numpy() - expected, axis=-1)
        defined = ~np.isnan(expected).any(axis=-1)
        assert (error[defined] <= relative * np.linalg.norm(expected, axis=-1)[defined]).all()


def poisoned(outputs: tuple) -> tuple:
    for tensor in outputs:
        support.poison(tensor)
    return outputs


def run_build(case: dict, device: str, results: Results) -> None:
    arguments = [case[f"in.{name}"] for name in ("ids", "log_probs", "root", "prefix_lens")]
    budget = int(case["in.budget"])
    tree = poisoned(ops.empty_tree(arguments[0].shape[0], budget, device))
    ops.build_tree_out(*support.put(device, *arguments), budget, tree)
    results.same_fields(tree)


def run_accept(case: dict, device: str, results: Results) -> None:
    names = ("tokens", "next_token", "next_sibling", "num_nodes", "predictions", "prefix_lens")
    arguments = [case[f"in.{name}"] for name in names]
    max_depth = int(case["in.max_depth"])
    accepted = poisoned(ops.empty_acceptance(arguments[0].shape[0], max_depth, device))
    ops.accept_tree_out(*support.put(device, *arguments), max_depth, accepted)
    results.same_fields(accepted)


def run_attention(case: dict, device: str, results: Results) -> None:
    (ancestors,) = support.put(device, case["in.ancestors"])
    for kind in ("f32", "bf16"):
        names = ("q", "k_tail", "prefix_out", "prefix_lse")
        arguments = [case[f"in.{kind}.{name}"] for name in names]
        q, k_tail, prefix_out, prefix_lse = support.put(device, *arguments)
        out = support.poison(torch.empty_like(prefix_out))
        scale = float(case["in.scale"])
        ops.tree_attention_out(q, k_tail, ancestors, prefix_out, prefix_lse, scale, out)
        if kind == "f32":
            results.near("f32.out", out, *ATTENTION_F32)
        else:
            results.near_rows("bf16.out", out, ATTENTION_BF16_ROW)


def run_topk(case: dict, device: str, results: Results) -> None:
    (logits,) = support.put(device, case["in.logits"])
    k = int(case["in.k"])
    top = poisoned(ops.empty_topk(logits.shape[0], k, device))
    ops.draft_topk_out(logits, k, top, int(case["in.vocab_start"]))
    results.same("ids", top.ids)
    results.same("values", top.values)
    results.near("lse", top.lse, *LSE)


def run_merge(case: dict, device: str, results: Results) -> None:
    arguments = support.put(device, *(case[f"in.{name}"] for name in ("ids", "values", "lse")))
    k_out = int(case["in.k_out"])
    top = poisoned(ops.empty_topk(arguments[0].shape[1], k_out, device))
    ops.merge_topk_out(*arguments, k_out, top)
    results.same("ids", top.ids)
    results.same("values", top.values)
    results.near("lse", top.lse, *LSE)


def run_mask(case: dict, device: str, results: Results) -> None:
    names = ("ancestors", "prefix_lens", "mask_indptr")
    ancestors, prefix_lens, indptr = support.put(device, *(case[f"in.{name}"] for name in names))
    for name, write_prefix in (("tree", False), ("whole", True)):
        (mask,) = support.put(device, case["in.mask"])
        ops.tree_mask(ancestors, prefix_lens, mask, indptr, write_prefix)
        results.same(name, mask)


def run_gather(case: dict, device: str, results: Results) -> None:
    rows, path = support.put(device, case["in.rows"], case["in.path"])
    out = support.poison(rows.new_empty(case["out.out"].shape))
    ops.gather_path_out(rows, path, int(case["in.num_nodes_per_request"]), out)
    results.same("out", out)


def kv_buffers(case: dict, device: str) -> list[torch.Tensor]:
    names = sorted(name for name in case if name.startswith("in.kv."))
    return support.put(device, *(case[name] for name in names))


def run_compact(case: dict, device: str, results: Results) -> None:
    buffers = kv_buffers(case, device)
    arguments = [case[f"in.{name}"] for name in ("slots", "path", "accept_len")]
    ops.compact_kv(*support.addresses(buffers, device), *support.put(device, *arguments))
    for i, buffer in enumerate(buffers):
        results.same(f"kv.{i}", buffer)


class ComposedStep:
    """The composition's tensors on a device, and its calls."""

    def __init__(self, case: dict, device: str) -> None:
        arguments = [case[f"in.{name}"] for name in ("ids", "log_probs", "root", "prefix_lens")]
        self.drafts = support.put(device, *arguments)
        names = ("q", "k_tail", "prefix_out", "prefix_lse")
        tensors = support.put(device, *(case[f"in.{name}"] for name in names))
        self.q, self.k_tail, self.prefix_out, self.prefix_lse = tensors
        (self.slots,) = support.put(device, case["in.slots"])
        self.buffers = kv_buffers(case, device)
        self.addresses = support.addresses(self.buffers, device)
        self.budget, self.scale = int(case["in.budget"]), float(case["in.scale"])
        bs, self.levels, _ = case["in.ids"].shape
        self.tree = ops.empty_tree(bs, self.budget, device)
        self.attention = torch.empty_like(self.prefix_out)
        self.greatest = ops.empty_topk(self.q.shape[0], 1, device)
        self.accepted = ops.empty_acceptance(bs, self.levels, device)
        width = self.attention[0].numel()
        self.gathered = self.attention.new_empty((bs, self.levels + 1, width))

    def run(self) -> None:
        tree, accepted = self.tree, self.accepted
        ops.build_tree_out(*self.drafts, self.budget, tree)
        ops.tree_attention_out(
            self.q, self.k_tail, tree.ancestors, self.prefix_out, self.prefix_lse, self.scale,
            self.attention,
        )
        logits = self.attention.flatten(1)
        ops.draft_topk_out(logits, 1, self.greatest)
        predictions = self.greatest.ids.view_as(tree.tokens)
        ops.accept_tree_out(
            tree.tokens, tree.next_token, tree.next_sibling, tree.num_nodes, predictions,
            self.drafts[3], self.levels, accepted,
        )
        ops.gather_path_out(logits, accepted.path, self.budget + 1, self.gathered)
        ops.compact_kv(*self.addresses, self.slots, accepted.path, accepted.accept_len)

    def check(self, results: Results) -> None:
        results.same_fields(self.tree)
        results.near("attention", self.attention, *ATTENTION_F32)
        results.same("predictions", self.greatest.ids.view_as(self.tree.tokens))
        results.same_fields(self.accepted)
        results.near("gathered", self.gathered, *ATTENTION_F32)
        for i, buffer in enumerate(self.buffers):
            results.same(f"kv.{i}", buffer)


def run_compose(case: dict, device: str, results: Results) -> None:
    step = ComposedStep(case, device)
    ops.load()
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        step.run()
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    step.check(results)


RUNNERS: dict[str, Callable[[dict, str, Results], None]] = {
    "accept": run_accept,
    "attention": run_attention,
    "build": run_build,
    "compact": run_compact,
    "compose": run_compose,
    "gather": run_gather,
    "mask": run_mask,
    "merge": run_merge,
    "topk": run_topk,
}


@pytest.mark.parametrize("name", suite_cases.CASES)
def test_torch_ops_pass_the_case(device, files, name):
    case = kdtr.read(files[name])
    results = Results(case)
    RUNNERS[name.partition("-")[0]](case, device, results)
    assert results.compared == {key for key in case if key.startswith("out.")}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_composition_is_one_graph(files):
    """Capture forbids what waits for the device or copies through the host."""
    case = kdtr.read(files["compose-step"])
    step = ComposedStep(case, "cuda")
    ops.load()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    poisoned((*step.tree, *step.accepted, *step.greatest, step.attention, step.gathered))
    graph.replay()
    torch.cuda.synchronize()
    step.check(Results(case))
