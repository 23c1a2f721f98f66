"""A run of ``python -m mmjax.latents`` with checked flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import jax

from mmjax.configurable import ConfigError, require
from mmjax.flags import counted
from mmjax.latents.checking import faults
from mmjax.latents.making import Maker, description_of
from mmjax.latents.pictures import Dataset, Folder, Records, Resizing
from mmjax.models.autoencoder.model import Autoencoder
from mmjax.progress import Progress

_SHOWN = 20
"""The most faults that are printed."""


def run(values: Mapping[str, str | int | bool]) -> int:
    """Makes or checks latents, by the values of the flags; returns the exit status.

    Raises:
      ConfigError: a value is wrong, or files cannot be read or written.
    """
    records: Records
    if values["pictures"]:
        records = Folder(str(values["pictures"]))
    else:
        records = Dataset(str(values["kind"]), str(values["data"]), str(values["media"]))
    autoencoder = replace(Autoencoder.read(str(values["vae"])), tile=int(values["tile"]))
    resizing = resizing_of(values, autoencoder.config.factor)
    folder = Path(str(values["out"])) / description_of(autoencoder, resizing, str(values["dtype"])).identity
    with Progress(len(records), "checking" if values["check"] else "encoding", log_every=100) as progress:
        if values["check"]:
            wrong = list(faults(autoencoder, resizing, folder, records, progress))
        else:
            devices = jax.local_devices()
            maker = Maker(
                autoencoder=autoencoder.spread(devices) if len(devices) > 1 else autoencoder,
                resizing=resizing,
                folder=folder,
                dtype=str(values["dtype"]),
                batch=int(values["batch"]) * len(devices),
                shard=int(values["shard"]),
            )
            result = maker.make(records, progress=progress)
    if values["check"]:
        for line in wrong[:_SHOWN]:
            print(line)
        print(f"{folder}: {counted(len(wrong), 'fault')}")
        return int(bool(wrong))
    for broken in result.broken[:_SHOWN]:
        print(f"left out: {broken.name}: {broken.reason}")
    if not result.made and not result.there:
        raise ConfigError(f"none of {counted(len(records), 'record')} has a picture that can be read")
    left_out = f", {counted(len(result.broken), 'picture')} left out" if result.broken else ""
    print(f"{folder}: {counted(result.made, 'latent')} made, {result.there} there before{left_out}")
    return 0


def resizing_of(values: Mapping[str, str | int | bool], factor: int) -> Resizing:
    """The resizing that flags name, for an autoencoder with this factor.

    Raises:
      ConfigError: a value is wrong.
    """
    block = int(values["block"]) or factor
    require(block % factor == 0, "--block", block, f"must be a multiple of the autoencoder's factor, {factor}")
    sides = str(values["size"] or "0,0").replace("x", ",").split(",")
    legal = len(sides) == 2 and all(side.strip().isdigit() for side in sides)
    require(legal, "--size", values["size"], "must be height and width, such as 256,256")
    return Resizing(
        size=(int(sides[0]), int(sides[1])),
        pixels=int(values["pixels"]),
        block=block,
        resample=str(values["resample"]),
    )
