"""The FP32 engine: a DeepSeek-V3 target and its DFlash drafter, without SGLang.

It is what the project's numbers are compared with. A checkpoint folder is run by numpy (`golden`,
`golden_loops`: written to be read) and by torch on the ops (`model`, `draft`, `loops`), greedily:
token by token, by a chain of drafts, by a tree of drafts. All give one text. It is made for
exactness, not for speed: attention gathers its context, experts run one after the other.

It imports the ops and the references, and nothing of SGLang.
"""

from kdtree_sglang.engine.config import UnsupportedConfig
from kdtree_sglang.engine.draft import Draft
from kdtree_sglang.engine.loops import MODES, Generation, Step, generate
from kdtree_sglang.engine.model import Target
from kdtree_sglang.engine.weights import CheckpointError

__all__ = [
    "MODES",
    "CheckpointError",
    "Draft",
    "Generation",
    "Step",
    "Target",
    "UnsupportedConfig",
    "generate",
]
