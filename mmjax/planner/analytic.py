"""Planning problems without measurements: times of modules from their FLOPs and an accelerator's datasheet.

An analytic profile gives the times of an ideal kernel mix of one fixed efficiency; it is labelled wherever it is shown.
It ranks layouts by their arithmetic and their tp traffic, and nothing here was measured.
"""

from __future__ import annotations

from functools import partial

from mmjax.pipeline.state_bytes import state_bytes
from mmjax.planner.accelerators import Accelerator
from mmjax.planner.problem import ModuleCosts
from mmjax.planner.work import ModuleWork, Shares, SplitMemory, StageMemory

PARAM_BYTES = 2
"""Bytes of a parameter in bfloat16."""
ACTIVATION_BYTES = 34
"""Bytes of activations for each token, layer and unit of width: Korthikanti et al., "Reducing Activation Recomputation
in Large Transformer Models" (2022), §4.1, without the scores of attention, which a fused kernel does not keep."""


def module_costs(
    accelerator: Accelerator,
    *,
    flops: float,
    parameters: float,
    layers: int,
    tokens: float,
    width: int,
    backward: float = 2.0,
    trained: bool = True,
    microbatch: int = 1,
    tp: tuple[int, ...] = (1, 2, 4, 8),
    efficiency: float = 0.5,
) -> ModuleCosts:
    """Seconds of one sample, by tp, and bytes of a module of equal layers without ends, as the costs of a `Problem`.

    Each layer has two all-reduces of its activations in bfloat16 over the tp group in forward and two in backward
    (Shoeybi et al., "Megatron-LM", §3), each of 2·(tp - 1)/tp of the bytes over the link.

    Args:
      accelerator: the device, such as `accelerator("h100")`.
      flops: FLOPs of the forward of one sample.
      parameters: number of parameters of all layers.
      layers: number of layers; pp has to divide it.
      tokens: tokens of one sample.
      width: width of activations.
      backward: the backward as a multiple of the forward (`mmjax.schedule.partition.backward_factor`); with 0 no
        activations are kept.
      trained: whether the module has gradients and optimizer states.
      microbatch: samples of a microbatch, for all of which `activation_bytes` counts.
      tp: every tp to give times for, the keys of `forward` and `backward`; it need not divide any size.
      efficiency: share of the datasheet's FLOPs per second that is reached, such as 0.5.
    """
    forward_seconds, backward_seconds = {}, {}
    for size in tp:
        compute = flops / (size * accelerator.flops * efficiency)
        traffic = 2 * layers * tokens * width * 2 * 2 * (size - 1) / size / accelerator.link
        forward_seconds[size] = compute + traffic
        backward_seconds[size] = backward * compute + (traffic if backward else 0.0)
    states = state_bytes(parameters, trained * parameters, item=PARAM_BYTES)
    return ModuleCosts(
        forward=forward_seconds,
        backward=backward_seconds,
        param_bytes=states.parameters + states.sums,
        optimizer_bytes=states.optimizer - states.direct,
        activation_bytes=ACTIVATION_BYTES * tokens * width * layers * microbatch if backward else 0.0,
        layers=layers,
    )


def module_work(
    name: str,
    *,
    flops: float,
    parameters: float,
    layers: int,
    tokens: float,
    width: int,
    after: tuple[str, ...] = (),
    tp: tuple[int, ...] = (1, 2, 4, 8),
) -> ModuleWork:
    """The work of a trained module of equal layers without ends, in which a sample is one row of `tokens` positions.

    The backward has twice the FLOPs of the forward. With a split backward, as many bytes are assumed to be kept from B
    to W as from F to B.

    Args:
      name: the module's name, such as "vision".
      flops: FLOPs of the forward of one sample.
      parameters: number of parameters of all layers.
      layers: number of layers.
      tokens: tokens of one sample.
      width: width of activations.
      after: names of the modules whose activations it takes, such as ("vision",) for "llm".
      tp: every tp that it may have, the keys of `ModuleWork.memory`.
    """
    row = 2 * tokens * width
    layer = ACTIVATION_BYTES * tokens * width
    return ModuleWork(
        name=name,
        layers=layers,
        model_width=width,
        width=round(tokens),
        rows=1.0,
        forward=Shares(layer=flops / layers),
        backward=Shares(layer=2 * flops / layers),
        parameters=Shares(layer=parameters / layers),
        trained=Shares(layer=parameters / layers),
        carried=row,
        output_bytes=row,
        memory={
            size: StageMemory(
                residuals=Shares(layer=layer / size),
                split=partial(SplitMemory, deferred=Shares(layer=layer / size)),
            )
            for size in tp
        },
        after=after,
    )
