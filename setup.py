"""Tags a wheel for its platform when it carries ops that `kdtree-sglang build` compiled.

Everything else is in pyproject.toml.
"""

from pathlib import Path

from setuptools import Distribution, setup


class OpsDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return any((Path(__file__).parent / "kdtree_sglang" / "_prebuilt").glob("*.so"))


setup(distclass=OpsDistribution)
