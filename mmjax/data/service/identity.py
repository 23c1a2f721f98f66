"""The identity of a run's batches, by which two hosts can tell whether they would make the same ones.

A trainer and its servers each read the same configuration. Everything but the step that a batch depends on goes into a
flat dict of names and values. Its hash goes with every request. If two hashes differ, the dicts are compared to name
the difference. Contents stand in for paths: the tokenizer's file, metadata of the first samples, and the first sample.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from mmjax.configurable import gin_name
from mmjax.data.config import DataConfig
from mmjax.data.loader import Source, StepMaker, make_source
from mmjax.data.own_rows import OwnRows
from mmjax.data.packing import Packer
from mmjax.data.processor.files import tokenizer_digest
from mmjax.data.reorder import StepOrder
from mmjax.data.service import tree
from mmjax.data.sources.config import FOLDER, SourceConfig
from mmjax.data.sources.known import Known
from mmjax.data.sources.mixture import Mixture
from mmjax.data.types import Sample
from mmjax.version import __version__

PROBED = 64
"""Samples whose metadata are part of the identity."""
_CONTENT_BY_HASH = ("tokenizer", "folder")
_PLACES = ("path", "media")
"""Fields of a dataset that are paths: the contents are compared instead."""
_SETTINGS = {
    "sequence_length": "Data.sequence_length",
    "microbatches": "Train.microbatches",
    "mask": "llm/Decoder.mask",
}
"""Fields of a packer that are settings; the others follow from layouts."""


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """The parts of a configuration that batches depend on."""

    data: DataConfig
    packer: Packer
    seed: int
    global_batch: int
    order: StepOrder | None = None
    task: Any = None
    sources: Mapping[str, SourceConfig] = field(default_factory=dict)
    known: Mapping[str, Known] = field(default_factory=dict)

    def maker(self, source: Source | None = None, own: OwnRows | None = None) -> StepMaker:
        """The maker of the batches, in the rows of `own` (all by default). ConfigError if the data cannot be read."""
        about: Any = {"seed": self.seed, "split": "train", "task": self.task, "sources": self.sources}
        about["known"] = self.known
        source = source or make_source(self.data, self.packer.encoders, **about)
        return StepMaker(source=source, packer=self.packer, global_batch=self.global_batch, order=self.order, own=own)

    def to_json(self) -> Any:
        """The spec as JSON, for another process of this host."""
        parts = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        return tree.write(parts)

    @classmethod
    def from_json(cls, value: Any) -> DataSpec:
        """The spec that `to_json` wrote."""
        return cls(**tree.read(value))


def identity(spec: DataSpec, source: Source) -> dict[str, Any]:
    """A flat description of the batches that `spec` makes of `source`; equal dicts make equal batches."""
    found: dict[str, Any] = {"mmjax": __version__, "mmjax (code of its data side)": _code()}
    # Two releases may scale an image, draw a random number, or split a word differently.
    libraries = ["numpy", "pillow", *(["tokenizers"] if spec.data.tokenizer else [])]
    libraries += ["jinja2"] if any(own.template == FOLDER for own in spec.sources.values()) else []
    found |= {name: version(name) for name in libraries}
    for values in filter(None, (spec.data, spec.data.origin.settings(spec.task))):
        for one in dataclasses.fields(values):
            if not one.metadata.get("here") and one.name not in _CONTENT_BY_HASH:
                found[f"{gin_name(type(values))}.{one.name}"] = getattr(values, one.name)
    for name, own in spec.sources.items():
        fields = [one.name for one in dataclasses.fields(SourceConfig) if one.name not in _PLACES]
        found |= {f"{name}/Source.{one}": getattr(own, one) for one in fields}
    found["Data.tokenizer (its content)"] = tokenizer_digest(spec.data.tokenizer)
    found |= {"Train.seed": spec.seed, "Train.global_batch": spec.global_batch}
    for one in dataclasses.fields(Packer):
        if one.name != "encoders":
            found[_SETTINGS.get(one.name, f"{one.name} (of the layouts)")] = getattr(spec.packer, one.name)
    if spec.order:
        found |= {f"reorder: {name}": _shortened(value) for name, value in vars(spec.order).items() if name[0] != "_"}
    for encoder, values in spec.packer.encoders.items():
        found |= {f"{encoder}: {one.name}": getattr(values, one.name) for one in dataclasses.fields(values)}
    found["the samples (metadata of the first)"] = _probe(source)
    if isinstance(source, Mixture):
        found["the samples (counts and places of all)"] = source.identity
        found["the records held out (of a run: mmjax.serve --run_dir)"] = source.held_out_identity
    found["the first sample (its content)"] = _content(source.sample(0))
    # As it will be read on the other side.
    return json.loads(json.dumps({name: tree.write(value) for name, value in found.items()}))


def digest(described: Mapping[str, Any]) -> str:
    """The hash of an identity."""
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def difference(own: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The first names at which two identities differ, with both values: "Train.seed is 0 here and …"."""
    names = [name for name in {**own, **other} if own.get(name) != other.get(name)]
    shown = [f"{name:.80} is {_shown(own.get(name))} here and {_shown(other.get(name))} there" for name in names[:2]]
    return "; ".join(shown) + (f"; and {len(names) - 2} more" if len(names) > 2 else "")


def _shown(value: Any) -> str:
    try:
        text = repr(tree.read(value))
    except (ValueError, RecursionError):
        text = f"{value!r:.100}" if not isinstance(value, (dict, list)) else "something else"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _shortened(value: Any) -> Any:
    """A short value itself, so that a difference can be shown; the hash of a long one, such as a graph or costs."""
    text = json.dumps(tree.write(value), sort_keys=True)
    return value if len(text) < 100 else hashlib.sha256(text.encode()).hexdigest()[:16]


def _probe(source: Source) -> str:
    size = min(PROBED, len(source)) if hasattr(source, "__len__") else PROBED  # type: ignore[arg-type]
    metas = [dataclasses.asdict(source.meta(index)) for index in range(size)]
    return hashlib.sha256(json.dumps(metas, sort_keys=True, default=int).encode()).hexdigest()[:16]


def _content(sample: Sample) -> str:
    """A hash of tokens, weights and media: hosts may decode differently, or have other files of equal name and size."""
    named = (*sorted(sample.media.items()), *sorted(sample.noise.items()), *sorted(sample.times.items()))
    arrays = [sample.tokens, sample.loss_weights, *(array for _, own in named for array in own)]
    return hashlib.sha256(b"\0".join(np.ascontiguousarray(array).tobytes() for array in arrays)).hexdigest()[:16]


@cache
def _code() -> str:
    """A hash of the code that makes batches: checkouts of one version number may differ."""
    here = Path(__file__).parent
    folders = here.parent, here.parents[1] / "schedule"  # the order of samples follows from schedules
    files = sorted(path for folder in folders for path in folder.rglob("*.py") if path.parent != here)
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:16]
