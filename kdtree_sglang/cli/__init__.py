"""`kdtree-sglang COMMAND`: one module a command, each with a `main(argv)`."""

from __future__ import annotations

import importlib
import sys

COMMANDS = {
    "build": "compile the ops ahead of time",
    "demo": "plain, DFLASH and ddtree-native on the same prompts, side by side",
    "engine": "the FP32 engine on a checkpoint, without SGLang, step by step",
    "kdtr": "list, show and compare KDTR files of tensors",
}


def main() -> int:
    """Run the command that the first argument names; its exit status is ours."""
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        print("usage: kdtree-sglang COMMAND [--help]\n")
        for name, purpose in COMMANDS.items():
            print(f"  {name:8} {purpose}")
        return 0 if sys.argv[1:] in (["-h"], ["--help"]) else 2
    module = importlib.import_module(f"kdtree_sglang.cli.{sys.argv[1]}")
    return module.main(sys.argv[2:])
