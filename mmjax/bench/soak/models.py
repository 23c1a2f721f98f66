"""Random models: kinds of encoders and generators, numbers of layers, and settings in which families differ."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mmjax.bench.soak.marks import FADE
from mmjax.models.choices import ACTIVATIONS
from mmjax.models.llama.checks import ROUTERS
from mmjax.models.vit.config import INTERPOLATIONS

FOLDER_LAYERS = 2
"""Number of layers of the LLM in the folder."""
_MASKS = (
    *("gemma3", "paligemma", "cornstarch", "text sees all before; media sees media before"),
    *(
        "prefix and media see prefix everywhere; suffix sees all before",
        "all sees text before; media sees media in item",
    ),
)
"""Masks under which text can be written."""
_PAINTERS = {"dit": "DiT", "mmdit": "MMDiT", "unet": "UNet"}
"""Classes of the settings of generators of pictures, by kind."""
_REMATS = ("none", "none", "dots", "full")


@dataclass(frozen=True, kw_only=True)
class Modules:
    """The modules of a drawn model.

    Attributes:
      encoders, generators: the kind of each by name, such as {"vision": "vit"}.
      layers: the number of layers of each by name, "llm" included.
      edges: the edges, such as "vision -> llm"; () for encoders that feed the LLM, which feeds generators.
    """

    encoders: Mapping[str, str]
    generators: Mapping[str, str]
    layers: Mapping[str, int]
    edges: tuple[str, ...] = ()

    @property
    def media(self) -> tuple[str, ...]:
        """Names of encoders and generators."""
        return (*self.encoders, *self.generators)

    @property
    def trained(self) -> tuple[str, ...]:
        """Names of all modules that can be frozen or trained, projectors included."""
        return (*self.media, *(f"{name}_projector" for name in self.media), "llm")


def draw_modules(rng: random.Random) -> Modules:
    """Draws encoders, generators and numbers of layers; uses, and so changes, ``rng``."""
    encoders = rng.choice(
        ({"vision": "vit"},) * 6 + ({"audio": "whisper"},) * 2 + ({"vision": "vit", "audio": "whisper"},)
    )
    if "vision" in encoders and rng.random() < 0.2:
        encoders = {**encoders, "temporal": "temporal"}
    generators = {"painter": rng.choice(("dit", "dit", "mmdit", "unet"))} if rng.random() < 0.25 else {}
    generators |= {"talker": "llama"} if rng.random() < 0.15 else {}
    names = (*encoders, "llm", *generators)
    layers = {name: rng.choice((1, 1, 2, 2, 3) if name != "llm" else (1, 2, 2, 3, 4)) for name in names}
    layers |= {"painter": 1} if generators.get("painter") == "unet" else {}
    edges = tuple(_edges(rng, encoders, generators))
    return Modules(encoders=encoders, generators=generators, layers=layers, edges=edges)


def _edges(rng: random.Random, encoders: Mapping[str, str], generators: Mapping[str, str]) -> Iterator[str]:
    """The edges of a model that is no star; none for one that is."""
    shows_images = generators.get("painter") == "dit" and "vision" in encoders and rng.random() < 0.5
    if "temporal" not in encoders and not shows_images:
        return
    for name in encoders:
        yield f"{name} -> {'temporal' if name == 'vision' and 'temporal' in encoders else 'llm'}"
    yield from (f"llm -> {name}" for name in generators)
    if shows_images:
        yield "vision -> painter"


def model_bindings(rng: random.Random, modules: Modules) -> Iterator[str]:
    """Yields drawn settings of all modules and projectors as bindings, such as "vision/ViT.width=16"."""
    yield f"Model.encoders={dict(modules.encoders)!r}"
    yield f"Model.generators={dict(modules.generators)!r}"
    yield f"Model.edges={modules.edges!r}"
    classes = {"vit": "ViT", "whisper": "Whisper", "temporal": "Temporal", "llama": "Decoder", **_PAINTERS}
    kinds = {**modules.encoders, **modules.generators}
    heads = dict[str, int]()
    for name, cls in {"llm": "Decoder", **{name: classes[kind] for name, kind in kinds.items()}}.items():
        heads[name] = rng.choice((2, 4)) if cls != "MMDiT" else 2
        yield f"{name}/{cls}.layers={modules.layers[name]}"
        yield f"{name}/{cls}.width=16"
        if cls != "UNet":
            yield from (f"{name}/{cls}.heads={heads[name]}", f"{name}/{cls}.mlp={rng.choice((16, 24))}")
        yield f"{name}/{cls}.remat={rng.choice(_REMATS)!r}"
    for name in (*modules.encoders, "llm"):
        if rng.random() < 0.15:
            place = rng.choice(("before", "after") if name == "llm" else ("before", "after", "projected"))
            yield f"{name}/Callbacks.{place}={FADE!r}"
    yield f"llm/Decoder.tied={rng.random() < 0.3}"
    yield f"llm/Decoder.z_loss={rng.choice((0.0, 0.0, 0.02))}"
    decoder = tuple(_decoder(rng, modules.layers["llm"], heads["llm"]))
    yield from decoder
    if rng.random() < 0.3:
        yield from _experts(rng, modules.layers["llm"])
    uses_mrope = any("rope_sections" in binding for binding in decoder)
    for name, kind in kinds.items():
        linear = rng.random() < 0.2
        yield f"{name}/Projector.kind={'linear' if linear else 'mlp'!r}"
        yield f"{name}/Projector.hidden={0 if linear else rng.choice((0, 0, 24))}"
        yield f"{name}/Projector.activation={rng.choice(ACTIVATIONS)!r}"
        yield f"{name}/Projector.norm={rng.choice(('none', 'none', 'layer', 'rms'))!r}"
        if kind == "vit":
            yield from _vit(rng, name, modules.layers[name])
        if kind == "whisper":
            yield from (f"{name}/Whisper.mels=8", f"{name}/Whisper.sample_rate=4000", f"{name}/Whisper.merge=4")
            yield from (f"{name}/Whisper.window=128", f"{name}/Whisper.hop=80")
            yield f"{name}/Whisper.activation={rng.choice(ACTIVATIONS)!r}"
            yield f"{name}/Whisper.norm_eps={rng.choice((1e-6, 1e-5))}"
            yield f"{name}/Whisper.k_bias={rng.random() < 0.7}"
            yield f"{name}/Whisper.edges={rng.choice(('silent', 'reflected'))!r}"
        if kind in _PAINTERS:
            yield from _painter(rng, name, kind)
        if kind == "llama":
            yield from (f"{name}/Decoder.kv_heads={rng.choice((1, 2))}", f"{name}/Decoder.vocab=11")
            yield f"{name}/Decoder.tied={rng.random() < 0.3}"
        depth = modules.layers["llm"]
        if kind in ("vit", "whisper", "temporal") and rng.random() < 0.2:
            inject = tuple(sorted(rng.sample(range(depth), rng.randint(1, depth))))
            yield f"{name}/Projector.inject={inject!r}"
            if rng.random() < 0.5:
                yield f"{name}/Projector.levels={tuple(rng.randrange(modules.layers[name]) for _ in inject)!r}"
        elif kind == "vit" and not uses_mrope and rng.random() < 0.3:
            yield f"{name}/Projector.newline=True"
            yield f"{name}/Projector.most_tiles={rng.choice((0, 2))}"


def _painter(rng: random.Random, name: str, kind: str) -> Iterator[str]:
    """Draws the noise process of a generator of pictures, and settings of its family."""
    scope = f"{name}/{_PAINTERS[kind]}"
    yield from (f"{scope}.steps=2", f"{scope}.drop_condition={rng.choice((0.0, 0.0, 0.3))}")
    if rng.random() < 0.5:
        yield from (f"{scope}.process='ddpm'", f"{scope}.prediction={rng.choice(('noise', 'v', 'sample'))!r}")
        yield from (f"{scope}.sampler={rng.choice(('ddim', 'dpm++'))!r}", f"{scope}.min_snr={rng.choice((0.0, 5.0))}")
    elif rng.random() < 0.5:
        yield from (f"{scope}.times='logit_normal'", f"{scope}.shift={rng.choice((1.0, 3.0))}")
    if kind == "mmdit":
        yield f"{scope}.queries={rng.choice((2, 4))}"
    if kind == "unet":
        yield from (f"{scope}.queries={rng.choice((2, 3))}", f"{scope}.channels=1", f"{scope}.widths=(8, 16)")
        yield from (f"{scope}.heads_by_level={rng.choice(((2, 0), (1, 2)))!r}", f"{scope}.mid_heads=2")
        yield from (f"{scope}.groups=4", f"{scope}.norm_eps=0.01", f"{scope}.canvases=((8, 8), (8, 16))")


def from_folder(bindings: Iterable[str], folder: Path) -> Iterator[str]:
    """Yields the bindings of a model whose LLM starts from a folder: without the settings that the folder decides."""
    yield f"llm/Weights.path={str(folder)!r}"
    for binding in bindings:
        if not binding.startswith("llm/Decoder.") or binding.startswith(("llm/Decoder.remat", "llm/Decoder.z_loss")):
            yield binding


def _decoder(rng: random.Random, layers: int, heads: int) -> Iterator[str]:
    """Draws settings in which families of language models differ."""
    kind = rng.choice(("plain", "plain", "latent", "delta"))
    yield f"llm/Decoder.mlp_bias={rng.random() < 0.25}"
    yield f"llm/Decoder.norm_plus_one={rng.random() < 0.25}"
    uses_mrope = rng.random() < 0.25
    if uses_mrope:
        yield f"llm/Decoder.rope_sections={rng.choice(((1, 1, 2), (2, 2, 0)))!r}"
    yield from _latent(rng, heads) if kind == "latent" else _heads(rng, uses_mrope=uses_mrope)
    if kind == "delta":
        yield from _delta(rng)
    elif rng.random() < 0.3:
        yield f"llm/Decoder.mask={rng.choice(_MASKS)!r}"
    if rng.random() < 0.3:
        sizes = {"window": (1, 5, 16, 1000), "chunk": (3, 16)}
        for name in ("window",) if uses_mrope else rng.choice((("window",), ("chunk",), ("window", "chunk"))):
            yield f"llm/Decoder.{name}={rng.choice(sizes[name])}"
        which = rng.choice(("full_layers", "full_every"))
        yield f"llm/Decoder.{which}={rng.randint(0, layers)}"
    scaling = rng.choice(("none", "none", "linear", "llama3", "yarn"))
    if scaling != "none":
        yield from (f"llm/Decoder.rope_scaling={scaling!r}", f"llm/Decoder.rope_factor={rng.choice((2.0, 8.0))}")
        yield f"llm/Decoder.rope_context={rng.choice((8, 64))}"
        yield f"llm/Decoder.rope_theta={rng.choice((100.0, 10000.0))}"


def _heads(rng: random.Random, *, uses_mrope: bool) -> Iterator[str]:
    """Draws attention with queries, keys and values of the features."""
    yield f"llm/Decoder.kv_heads={rng.choice((2, 2, 4, 1))}"
    for name in ("qkv_bias", "o_bias", "qk_norm", "attention_gate"):
        yield f"llm/Decoder.{name}={rng.random() < 0.25}"
    yield f"llm/Decoder.qk_norm_whole={rng.random() < 0.25}"
    yield f"llm/Decoder.head_dim={8 if uses_mrope else rng.choice((0, 0, 6))}"


def _latent(rng: random.Random, heads: int) -> Iterator[str]:
    """Draws latent attention."""
    yield f"llm/Decoder.kv_heads={heads}"
    yield f"llm/Decoder.kv_rank={rng.choice((6, 10))}"
    yield f"llm/Decoder.q_rank={rng.choice((0, 12))}"
    yield from ("llm/Decoder.nope_head_dim=6", "llm/Decoder.rope_head_dim=8")
    yield f"llm/Decoder.v_head_dim={rng.choice((0, 4))}"
    yield f"llm/Decoder.rope_mscale_all={rng.choice((0.0, 1.0))}"


def _delta(rng: random.Random) -> Iterator[str]:
    """Draws delta layers, all or some of the layers."""
    key_heads = rng.choice((2, 4))
    yield f"llm/Decoder.delta_heads={key_heads}"
    yield f"llm/Decoder.delta_value_heads={rng.choice((0, 2 * key_heads))}"
    yield from ("llm/Decoder.delta_key_dim=6", "llm/Decoder.delta_value_dim=5")
    yield f"llm/Decoder.delta_taps={rng.choice((2, 4))}"
    yield f"llm/Decoder.attention_every={rng.choice((2, 2, 4))}"


def _experts(rng: random.Random, layers: int) -> Iterator[str]:
    """Draws an LLM with experts."""
    experts, router = rng.choice((2, 4, 6)), rng.choice(ROUTERS)
    yield f"llm/Decoder.experts={experts}"
    yield f"llm/Decoder.experts_per_token={rng.choice((1, 2))}"
    yield f"llm/Decoder.expert_mlp={rng.choice((0, 8))}"
    yield f"llm/Decoder.dense_layers={rng.randrange(layers)}"
    yield f"llm/Decoder.router={router!r}"
    yield f"llm/Decoder.router_normalised={rng.random() < 0.7}"
    yield f"llm/Decoder.router_scale={rng.choice((1.0, 2.5))}"
    yield f"llm/Decoder.router_bias={rng.random() < 0.3}"
    yield f"llm/Decoder.balance_loss={rng.choice((0.0, 0.01))}"
    yield f"llm/Decoder.router_z_loss={rng.choice((0.0, 0.01))}"
    groups = rng.choice((1, 1, 2))
    yield from (f"llm/Decoder.router_groups={groups}", f"llm/Decoder.router_group_limit={groups}")
    shared = rng.choice((0, 0, 1))
    yield f"llm/Decoder.shared_experts={shared}"
    yield f"llm/Decoder.shared_gate={shared > 0 and rng.random() < 0.5}"
    yield f"llm/Decoder.expert_capacity={rng.choice((0.0, 0.0, 0.7, 1.25))}"


def _vit(rng: random.Random, name: str, layers: int) -> Iterator[str]:
    positions, merge = rng.choice(("rope2d", "axial", "axial_centres", "learned2d")), rng.choice((1, 2, 2))
    yield f"{name}/ViT.merge={merge}"
    yield f"{name}/ViT.positions={positions!r}"
    if positions == "learned2d" and rng.random() < 0.5:
        yield f"{name}/ViT.interpolate={rng.choice(INTERPOLATIONS[1:])!r}"
        yield f"{name}/ViT.grid=5"
    class_token = rng.random() < 0.5
    yield f"{name}/ViT.class_token={class_token}"
    registers = rng.choice((0, 0, 3))
    yield f"{name}/ViT.registers={registers}"
    yield f"{name}/ViT.qkv_bias={rng.random() < 0.8}"
    yield f"{name}/ViT.frames={rng.choice((1, 1, 2))}"
    yield f"{name}/ViT.norm={rng.choice(('layer', 'layer', 'rms'))!r}"
    yield f"{name}/ViT.gated={rng.random() < 0.3}"
    if not (class_token or registers) and rng.random() < 0.5:
        yield f"{name}/ViT.window={merge * rng.choice((1, 2))}"
        yield f"{name}/ViT.full_at={tuple(sorted(rng.sample(range(layers), rng.randint(0, layers))))!r}"
    yield f"{name}/ViT.patch_bias={rng.random() < 0.7}"
    yield f"{name}/ViT.stem_norm={rng.random() < 0.3}"
    yield f"{name}/ViT.last_norm={rng.random() < 0.7}"
    yield f"{name}/ViT.layer_scale={rng.random() < 0.3}"
    yield f"{name}/ViT.norm_eps={rng.choice((1e-6, 1e-5))}"
    yield f"{name}/ViT.activation={rng.choice(ACTIVATIONS)!r}"
