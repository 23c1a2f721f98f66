"""Layers with experts train under layouts, schedules and adapters as all experts for all tokens on one device do."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import bindings, speaking, tiny

from mmjax.config import load_config
from mmjax.mesh.layout import Layout
from mmjax.models.experts import exchange
from mmjax.parity import check
from mmjax.pipeline import weight_uses

Changes = dict[str, Any]
SOFTMAX: Changes = {"llm/Decoder.experts": 4, "llm/Decoder.balance_loss": 0.05}
SIGMOID: Changes = {
    "llm/Decoder.experts": 8,
    "llm/Decoder.experts_per_token": 3,
    "llm/Decoder.router": "sigmoid",
    "llm/Decoder.router_scale": 2.5,
    "llm/Decoder.router_groups": 4,
    "llm/Decoder.router_group_limit": 2,
    "llm/Decoder.router_bias": True,
    "llm/Decoder.router_bias_rate": 0.05,
    "llm/Decoder.balance_loss": 0.05,
    "llm/Decoder.router_z_loss": 0.01,
    "llm/Optimizer.rates": {"layers/*/experts/*": 0.5},
    "Train.clip_norm": 0.5,
}
SHARED: Changes = {  # six experts, whose mean load is no fp32 number, and loads that are often equal to it
    "llm/Decoder.experts": 6,
    "llm/Decoder.expert_mlp": 20,
    "llm/Decoder.shared_experts": 2,
    "llm/Decoder.shared_gate": True,
    "llm/Decoder.dense_layers": 1,
    "llm/Decoder.router_normalised": False,
    "llm/Decoder.router_groups": 3,
    "llm/Decoder.router_group_limit": 2,
    "llm/Decoder.router_bias": True,
    "llm/Decoder.balance_loss": 0.05,
    "llm/Layout.layers": (),
}
CAPACITY: Changes = SOFTMAX | {"llm/Decoder.expert_capacity": 1.0, "llm/Decoder.router_bias": True}
ROUTERS = {"softmax": SOFTMAX, "sigmoid": SIGMOID, "shared": SHARED, "capacity": CAPACITY}


def llm(vision: int = 2, **degrees: Any) -> Changes:
    """A layout of the LLM, and the encoder on ranks behind it."""
    layout = Layout(**degrees)
    changes: Changes = {f"llm/Layout.{name}": value for name, value in degrees.items()}
    return changes | {"vision/Layout.dp": vision, "vision/Layout.rank_offset": layout.size}


SPLIT: Changes = {"Train.schedule": "zb-h1"}
FAST: dict[str, Changes] = {
    "capacity, cp in another order": CAPACITY | llm(cp=2, dp=2, ep=2) | {"llm/Layout.cp_tokens": "zigzag"},
}
LONG: dict[str, Changes] = {
    "softmax, tp and pp": SOFTMAX | llm(tp=2, pp=2),
    "sigmoid, one device": SIGMOID,
    "sigmoid, dp and cp": SIGMOID | llm(dp=2, cp=2),
    "shared, zb-h1": SHARED | llm(tp=2, pp=2) | SPLIT,
    "adapters": SHARED | llm(tp=2) | {"llm/Lora.rank": 2, "llm/Lora.targets": ("attn/q", "experts/*", "shared/up")},
    "capacity, tp, pp and zb-h1": SIGMOID | {"llm/Decoder.expert_capacity": 0.75} | llm(tp=2, pp=2) | SPLIT,
}
LAYOUTS: dict[str, Changes] = {
    "tp 4": llm(tp=4),
    "tp without sp": llm(tp=2, sp=False),
    "tp and dp": llm(tp=2, dp=2),
    "cp and tp": llm(cp=2, tp=2),
    "cp and pp": llm(cp=2, pp=2),
    "cp by rings": llm(cp=2, cp_way="ring"),
    "pp 4": llm(pp=4),
    "chunks": llm(pp=2, chunks=2),
    "zb-h1": llm(tp=2, pp=2) | SPLIT,
    "zb-h1 without sp": llm(tp=2, pp=2, sp=False) | SPLIT,
    "three phases": {"llm/Layout.tp": 2, "vision/Layout.dp": 2, "Train.schedule": "three-phase"},
    "one program": {"llm/Layout.tp": 2, "llm/Layout.dp": 2, "vision/Layout.dp": 4},
    "full recomputation": llm(tp=2) | {"llm/Decoder.remat": "full"},
    "ep": llm(dp=4, ep=4) | {"llm/Decoder.experts": 12},
}
SLOW = {f"{router}, {name}": ROUTERS[router] | layout for router in ROUTERS for name, layout in LAYOUTS.items()}
FROZEN: Changes = {"llm/Optimizer.frozen": True, "llm/Lora.rank": 2, "llm/Lora.targets": ("experts/*",)}
SLOW |= {
    "adapters of a frozen model, zb-h1": SOFTMAX | llm(pp=2) | SPLIT | FROZEN,
    "adapters of a frozen model, ep": SOFTMAX | llm(dp=2, ep=2) | FROZEN,
    "adapters of a router": SIGMOID | llm(tp=2) | {"llm/Lora.rank": 2, "llm/Lora.targets": ("experts/router",)},
    "frozen": SIGMOID | llm(tp=2) | {"llm/Optimizer.frozen": True},
    "optimizer instances": SIGMOID | llm(dp=4, optimizer_instances=2),
    "a talker": speaking("2,1,1", "1,1,2", "2,1,1")
    | {"talker/Decoder.experts": 4, "talker/Decoder.balance_loss": 0.05, "talker/Decoder.router_bias": True},
}


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        *(pytest.param(changes, id=name) for name, changes in FAST.items()),
        *(pytest.param(changes, id=name, marks=pytest.mark.long) for name, changes in LONG.items()),
        *(pytest.param(changes, id=name, marks=pytest.mark.slow) for name, changes in SLOW.items()),
    ],
)
def test_experts_train_as_on_one_device(changes: Changes) -> None:
    report = check(tiny(**changes), style="silent")
    assert report and report.ok, report and report.numbers()


UNROLLED: Changes = {"Train.unroll": True, "llm/Decoder.remat": "dots"}
SUMMED: dict[str, Changes] = {
    "all-to-all in halves": SIGMOID | llm(dp=4, ep=4, ep_way="all-to-all"),
    "tp and pp": SHARED | llm(tp=2, pp=2),
    "tp in place of ep, one program": SOFTMAX
    | {"llm/Layout.tp": 2, "llm/Layout.dp": 4, "llm/Layout.ep": 2, "llm/Layout.expert_tp": 1, "vision/Layout.dp": 8},
    "a ring, whose weights have several uses": SOFTMAX | llm(dp=2, ep=2),
    "zb-h1": SHARED | llm(tp=2, pp=2) | SPLIT,
}


@pytest.mark.parametrize(
    "changes",
    [pytest.param(changes, id=name, marks=pytest.mark.long) for name, changes in SUMMED.items()],
)
def test_gradients_that_products_add_to_sums_are_those_of_one_device(
    changes: Changes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As bf16 weights are trained; fp32 tells a weight that counts twice, or not at all, from the reference."""
    monkeypatch.setattr(weight_uses, "adds_to_sum", lambda dtype: True)
    monkeypatch.setattr(exchange, "HALF_TOKENS", 8)
    report = check(tiny(**changes, **UNROLLED), style="silent")
    assert report and report.ok, report and report.numbers()


def test_published_experts_become_few_but_stay_a_choice() -> None:
    """Of groups, too; and the small configuration is legal."""
    from mmjax.parity.shrink import shrink

    lines = ["llm/Decoder.preset='qwen3-30b-a3b'", "llm/Decoder.router_groups=16", "llm/Decoder.router_group_limit=4"]
    lines += [
        "llm/Decoder.dense_layers=3",
        "llm/Decoder.shared_experts=6",
        "llm/Layout.tp=4",
        "vision/Layout.rank_offset=4",
    ]
    kept = [line for line in bindings() if not line.startswith("llm/Decoder")]
    small = shrink(load_config([], [*kept, *lines]), 2, 261).recipe.model.llm.settings
    assert (small.experts, small.experts_per_token, small.router_groups, small.router_group_limit) == (8, 3, 4, 3)
    assert 0 < small.dense_layers < small.layers and small.expert_mlp == 40 and small.shared_experts == 2
