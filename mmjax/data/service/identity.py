"""The identity of a run's batches, by which two hosts check that they would make the same ones.

A trainer and its servers each read the same configuration. All that a batch depends on, except its step, goes into a
flat dict of names and values. The hash of this dict goes with every request. If two hashes differ, the dicts are
compared to name the difference. Contents stand in for paths: the tokenizer's file, metadata of the first samples, and
the first sample.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from mmjax.configurable import gin_name
from mmjax.data import tree
from mmjax.data.batch_spec import BatchSpec
from mmjax.data.packing import Packer
from mmjax.data.processor.files import tokenizer_digest
from mmjax.data.source import Source
from mmjax.data.sources.config import FOLDER, SourceConfig
from mmjax.data.sources.mixture import Mixture
from mmjax.data.types import Sample
from mmjax.user_code import names_code
from mmjax.version import __version__

PROBED = 64
"""Samples whose metadata are part of the identity."""
_PATHS = ("tokenizer", "folder")
"""Settings of `Data` and of tasks that are paths: the contents are compared instead."""
_SOURCE_PATHS = ("path", "media")
"""The same of `Source`."""
_SETTINGS = {
    "sequence_length": "Data.sequence_length",
    "microbatches": "Train.microbatches",
    "mask": "llm/Decoder.mask",
}
"""Fields of a packer that are settings; the others follow from layouts."""


def identity(spec: BatchSpec, source: Source) -> dict[str, Any]:
    """A flat description of the batches that `spec` makes of `source`; equal dicts make equal batches.

    By name for people, such as "Train.seed", with values of JSON (see `tree`). Reads the first samples.

    Args:
      spec: all that batches depend on, as `planned_batch_spec(recipe)` gives it.
      source: the run's training samples, as `open_source(recipe, split="train")` opens them.
    """
    described: dict[str, Any] = {"mmjax": __version__, "mmjax (code of its data side)": _code()}
    # Two releases may scale an image, draw a random number, or split a word differently.
    libraries = ["numpy", "pillow", *(["tokenizers"] if spec.data.settings.tokenizer else [])]
    libraries += ["jinja2"] if any(config.template == FOLDER for config in spec.data.sources.values()) else []
    described |= {name: version(name) for name in libraries}
    data, origin = spec.data.settings, spec.data.origin
    for settings in filter(None, (data, origin.config)):
        for field in dataclasses.fields(settings):
            if not field.metadata.get("local") and field.name not in _PATHS:
                described[f"{gin_name(type(settings))}.{field.name}"] = getattr(settings, field.name)
    if names_code(data.task) and not data.sources:
        described["Data.task (its code)"] = _code_of(type(origin))
    source_fields = [field.name for field in dataclasses.fields(SourceConfig) if field.name not in _SOURCE_PATHS]
    for name, config in spec.data.sources.items():
        described |= {f"{name}/Source.{field}": getattr(config, field) for field in source_fields}
    described["Data.tokenizer (its content)"] = tokenizer_digest(spec.data.settings.tokenizer)
    described |= {"Train.seed": spec.seed, "Train.global_batch": spec.global_batch}
    for field in dataclasses.fields(Packer):
        if field.name != "encoders":
            described[_SETTINGS.get(field.name, f"{field.name} (of the layouts)")] = getattr(spec.packer, field.name)
    if spec.order:
        values = {name: value for name, value in vars(spec.order).items() if name[0] != "_"}
        described |= {f"reorder: {name}": _shortened(value) for name, value in values.items()}
    for name, encoder in spec.packer.encoders.items():
        described |= {f"{name}: {field.name}": getattr(encoder, field.name) for field in dataclasses.fields(encoder)}
    described["the samples (metadata of the first)"] = _probe(source)
    if isinstance(source, Mixture):
        described["the samples (counts and places of all)"] = source.identity
        described["the records held out (of a run: mmjax.serve --run_dir)"] = source.held_out_identity
    described["the first sample (its content)"] = _content(source.sample(0))
    # Through JSON, as the other side will read it.
    return json.loads(json.dumps({name: tree.write(value) for name, value in described.items()}))


def digest(described: Mapping[str, Any]) -> str:
    """The hash of an identity, as `identity(spec, source)` describes it, as 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """The first names at which two identities differ, with both values: "Train.seed is 0 here and 1 there".

    "" if there is no difference.
    """
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    shown = [f"{name:.80} is {_shown(ours.get(name))} here and {_shown(theirs.get(name))} there" for name in names[:2]]
    return "; ".join(shown) + (f"; and {len(names) - 2} more" if len(names) > 2 else "")


def _shown(value: Any) -> str:
    try:
        text = repr(tree.read(value))
    except (ValueError, RecursionError):
        text = f"{value!r:.100}" if not isinstance(value, (dict, list)) else "something else"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _shortened(value: Any) -> Any:
    """A short value unchanged, so that a difference can be shown; the hash of a long one, such as a graph or costs."""
    text = json.dumps(tree.write(value), sort_keys=True)
    return value if len(text) < 100 else hashlib.sha256(text.encode()).hexdigest()[:16]


def _probe(source: Source) -> str:
    size = min(PROBED, len(source)) if hasattr(source, "__len__") else PROBED  # type: ignore[arg-type]
    metas = [dataclasses.asdict(source.meta(index)) for index in range(size)]
    return hashlib.sha256(json.dumps(metas, sort_keys=True, default=int).encode()).hexdigest()[:16]


def _content(sample: Sample) -> str:
    """A hash of tokens, weights and media: hosts may decode differently, or have other files of equal name and size."""
    named = sample.media, sample.noise, sample.times, sample.dropped
    by_module = [item for values in named for item in sorted(values.items())]
    arrays = [sample.tokens, sample.loss_weights, *(array for _, arrays in by_module for array in arrays)]
    return hashlib.sha256(b"\0".join(np.ascontiguousarray(array).tobytes() for array in arrays)).hexdigest()[:16]


def _code_of(cls: type[Any]) -> str:
    """A hash of the file that defines a class of a user's own."""
    return hashlib.sha256(Path(inspect.getfile(cls)).read_bytes()).hexdigest()[:16]


@cache
def _code() -> str:
    """A hash of the code that makes batches: checkouts of one version number may differ."""
    service = Path(__file__).parent
    folders = service.parent, service.parents[1] / "schedule"  # the order of samples follows from schedules
    files = sorted(path for folder in folders for path in folder.rglob("*.py") if path.parent != service)
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:16]
