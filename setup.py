"""Packages of the distribution; all else about it is in pyproject.toml.

`configs/` holds no Python; it becomes the folder `mmjax/configs` of a wheel (see `package-dir` there).
"""

from setuptools import find_packages, setup

CONFIGS = ("", ".finetune", ".paper", ".paper.parts")

setup(packages=[*find_packages(include=["mmjax*"]), *(f"mmjax.configs{folder}" for folder in CONFIGS)])
