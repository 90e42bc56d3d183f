"""Resolves argument lists as `sglang.launch_server` would, and prints what each one ends in.

Standard input: a JSON list of argument lists. Standard output, last line: a JSON list of
{"error": "TypeName: message"} or {"fields": {...}}. A process of its own, because SGLang's plug-in
loading and its CPU stand-ins are process-wide; one process for all cases, because importing SGLang
takes longer than resolving.
"""

import json
import os
import sys

FIELDS = (
    "speculative_algorithm",
    "speculative_num_draft_tokens",
    "speculative_dflash_block_size",
    "speculative_eagle_topk",
    "speculative_num_steps",
    "speculative_draft_attention_backend",
    "attention_backend",
    "max_running_requests",
    "page_size",
)


def resolve(arguments: list[str]) -> dict:
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.server_args import prepare_server_args

    os.environ.pop("DDTREE_CANDIDATES", None)
    try:
        server_args = prepare_server_args(arguments)
        server_args.resolve_once()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    view = resolving_view(server_args)
    fields = {name: getattr(view, name) for name in FIELDS}
    fields["candidates"] = os.environ.get("DDTREE_CANDIDATES")
    return {"fields": fields}


def main() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    print(json.dumps([resolve(arguments) for arguments in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
