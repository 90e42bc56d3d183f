"""An unmodified SGLang 0.5.23 server on a machine without a GPU.

SGLang's CPU engine needs a compiled `sgl_kernel` that no registry publishes for its own pins, and
DFLASH is limited to accelerators by checks and by missing attention code. This package supplies
both, for tests and for a demo without a GPU:

* `site/sgl_kernel`: pure-torch stand-ins for the few symbols that SGLang imports.
* `site/*.dist-info`: makes SGLang's plug-in loader find `plugin.apply`, which adapts what is left.
* `backend.py`: speculative verification, with an optional tree mask, for `torch_native`.

Everything takes effect through `environment()` and `server_flags()` in a server *process*. A GPU
server uses neither, so it never imports anything below this package.
"""

import os
from pathlib import Path

PLUGIN_NAME = "kdtree_cpu_sglang"
SITE = Path(__file__).resolve().parent / "site"


def environment() -> dict[str, str]:
    """The variables that a CPU server process needs, to be merged over `os.environ`."""
    inherited = os.environ.get("PYTHONPATH")
    variables = {
        # First on the path, so that these stand-ins win over the installed CUDA `sgl_kernel`.
        "PYTHONPATH": str(SITE) if not inherited else os.pathsep.join([str(SITE), inherited]),
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        # Test models are far too small to share among threads, and on busy cores the barriers of
        # two threads cost more than everything else: 68 s against 1.4 s for 16 answers.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    allowed = os.environ.get("SGLANG_PLUGINS")
    if allowed:
        # An allow list must not lock out the adaptations.
        variables["SGLANG_PLUGINS"] = f"{allowed},{PLUGIN_NAME}"
    return variables


def server_flags() -> list[str]:
    """The `sglang.launch_server` flags that go with `environment()`.

    fp32, because only there do a verify of N rows and a decode of one row agree on every token.
    """
    return ["--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"]
