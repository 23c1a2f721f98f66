"""Values for ``Train.unroll``, ``Train.overlap_grad_reduce`` and the ``remat`` of modules where they are ``'auto'``.

They are chosen here, on the host, before a program is traced. Imports no JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from mmjax.configurable import setting_name
from mmjax.models.choices import AUTO
from mmjax.recipe.recipe import Recipe

FITS: Mapping[str, float] = {"none": 0.75, "dots": 0.93, "full": 0.93}
"""The share of a device's usable memory that an estimate may take, by ``remat``.

``none`` must leave room: it gains little over ``dots``, and temporaries are estimates.
"""
DEVICE_DEFAULTS = (".unroll", ".overlap_grad_reduce", ".remat")
"""Ends of the names of these settings, such as "Train.unroll" and "llm/Decoder.remat"."""
GIGA = 1e9
GPU = "gpu"
"""The platform of GPUs, as JAX names it."""


@dataclass(frozen=True)
class TargetDevice:
    """The device that a run's defaults are chosen for.

    Attributes:
      platform: such as "cpu" or "gpu".
      memory: bytes that a run may take of a GPU.
      kind: its name, by which programs choose kernels, such as "NVIDIA H100 80GB HBM3".
      origin: whose memory it is, in words, such as "92 % of an H100's 80 GB"; for the lines that tell the choice.
    """

    platform: str
    memory: float = 0.0
    kind: str = "planned"
    origin: str = ""

    @property
    def is_gpu(self) -> bool:
        """Whether ``platform`` is "gpu"."""
        return self.platform == GPU


@dataclass(frozen=True)
class Estimate:
    """Estimated bytes of a run on its fullest device.

    Attributes:
      bytes: all arrays and temporaries at the fullest moment.
      residuals: bytes that wait for their backward, by module.
    """

    bytes: float
    residuals: Mapping[str, float]


@dataclass(frozen=True)
class Resolved:
    """A recipe in which nothing is left to the devices.

    Attributes:
      recipe: the recipe.
      lines: a line for each choice that was made for a GPU, with its reason; () for other devices.
    """

    recipe: Recipe
    lines: tuple[str, ...] = ()


def resolve(recipe: Recipe, device: TargetDevice, estimate: Callable[[Recipe], Estimate]) -> Resolved:
    """Chooses values for each of these settings that is ``'auto'``; keeps other values.

    On GPUs layers are unrolled, and gradients are reduced inside the last backward. Modules recompute nothing on other
    devices, nor on GPUs where the estimate leaves room. Else all of them keep their products ('dots'); if that does not
    fit, modules recompute all ('full'), first the one that keeps most, until it fits.

    Args:
      recipe: the run's configuration.
      device: the device; all processes of a run have to give the same memory.
      estimate: the estimate of a recipe that leaves nothing open, on its layouts.
    """
    lines = []
    if recipe.train.unroll == AUTO:
        recipe = with_unroll(recipe, device.platform)
        lines += ["Train.unroll=True: on GPUs layers are unrolled"] * device.is_gpu
    recipe = with_overlap(recipe, device.platform)
    names = open_remat(recipe)
    if not names:
        return Resolved(recipe, tuple(lines))
    if not device.is_gpu:
        return Resolved(with_remat(recipe, names, "none"))
    recipe, line = _fitting_remat(recipe, names, device, estimate)
    return Resolved(recipe, (*lines, line))


def _fitting_remat(
    recipe: Recipe, names: Collection[str], device: TargetDevice, estimate: Callable[[Recipe], Estimate]
) -> tuple[Recipe, str]:
    """The recipe with the cheapest ``remat`` of the modules ``names`` that fits, and the line that tells it."""
    rejected = list[str]()

    def describe(tried: Recipe, size: float) -> tuple[Recipe, str]:
        limit = f"{device.memory / GIGA:.3g} GB ({device.origin})"
        before = f"; {', '.join(rejected)}" if rejected else ""
        return tried, f"{remat_text(tried, names)}: an estimated {size / GIGA:.3g} of {limit}{before}"

    for remat in ("none", "dots"):
        tried = with_remat(recipe, names, remat)
        estimated = estimate(tried)
        if estimated.bytes <= FITS[remat] * device.memory:
            return describe(tried, estimated.bytes)
        rejected.append(f"{remat!r} would take {estimated.bytes / GIGA:.3g}")
    size = estimated.bytes
    for name in sorted(names, key=lambda name: -estimated.residuals.get(name, 0.0)):
        if size > FITS["full"] * device.memory and estimated.residuals.get(name, 0.0):
            tried = with_remat(tried, [name], "full")
            size = estimate(tried).bytes
    return describe(tried, size)


def leaves_open(recipe: Recipe) -> bool:
    """Whether the recipe leaves a setting to the devices."""
    return AUTO in (recipe.train.unroll, recipe.train.overlap_grad_reduce) or bool(open_remat(recipe))


def open_remat(recipe: Recipe) -> tuple[str, ...]:
    """Names of the modules whose ``remat`` is left to the devices, such as ("vision", "llm")."""
    return tuple(name for name, node in recipe.model.nodes.items() if getattr(node.settings, "remat", "") == AUTO)


def with_unroll(recipe: Recipe, platform: str) -> Recipe:
    """The recipe with layers unrolled on a platform such as "gpu", or stacked; unchanged where it says which."""
    return _on_gpus(recipe, "unroll", platform)


def with_overlap(recipe: Recipe, platform: str) -> Recipe:
    """The recipe with gradients reduced inside the last backward on a platform such as "gpu"; see ``with_unroll``."""
    return _on_gpus(recipe, "overlap_grad_reduce", platform)


def _on_gpus(recipe: Recipe, field: str, platform: str) -> Recipe:
    """The recipe with a field of ``Train`` that is True on GPUs and False elsewhere; unchanged where it is set."""
    if getattr(recipe.train, field) != AUTO:
        return recipe
    return replace(recipe, train=replace(recipe.train, **{field: platform == GPU}))


def with_remat(recipe: Recipe, names: Collection[str], remat: str) -> Recipe:
    """The recipe with ``remat`` in the modules ``names``."""
    model = recipe.model.map(lambda node: node.with_settings(remat=remat) if node.name in names else node)
    return replace(recipe, model=model)


def with_earlier_defaults(recipe: Recipe, before: Recipe | None) -> Resolved:
    """The recipe with the values that a run has recorded, for each setting that is ``'auto'`` in the recipe.

    So a run that goes on, on other devices too, has the programs with which it began.

    Args:
      recipe: the run's configuration.
      before: that of the run so far; ``None`` without one, which changes nothing.

    Returns:
      The recipe, and one line with the choices if they are not those of a CPU.
    """
    if before is None:
        return Resolved(recipe)
    train, taken = recipe.train, []
    if train.unroll == AUTO and before.train.unroll != AUTO:
        train = replace(train, unroll=before.train.unroll)
        taken += ["Train.unroll=True"] * (train.unroll is True)
    if train.overlap_grad_reduce == AUTO and before.train.overlap_grad_reduce != AUTO:
        train = replace(train, overlap_grad_reduce=before.train.overlap_grad_reduce)
    recipe = replace(recipe, train=train)
    for name in open_remat(recipe):
        earlier = before.model.nodes.get(name)
        remat = getattr(earlier.settings, "remat", AUTO) if earlier else AUTO
        if remat != AUTO:
            recipe = with_remat(recipe, [name], remat)
            taken += [remat_text(recipe, [name])] * (remat != "none")
    return Resolved(recipe, (f"{', '.join(taken)}: as the run so far",) if taken else ())


def remat_text(recipe: Recipe, names: Collection[str]) -> str:
    """The ``remat`` of modules, as "vision/ViT.remat='dots', llm/Decoder.remat='full'"."""
    settings = {name: recipe.model[name].settings for name in names}
    return ", ".join(f"{setting_name(name, value, 'remat')}={value.remat!r}" for name, value in settings.items())
