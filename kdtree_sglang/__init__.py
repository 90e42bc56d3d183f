"""Best-first draft trees over a DFlash drafter, as a plug-in for SGLang.

SGLang finds `kdtree_sglang.plugin.activate` through the entry-point group `sglang.srt.plugins`;
importing this package alone imports neither SGLang nor torch.
"""

__version__ = "0.1.0"
SGLANG_VERSION = "0.5.23"
