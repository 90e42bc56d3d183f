"""Attention backends that can verify a tree."""

from kdtree_sglang.attention.registry import register

__all__ = ["register"]
