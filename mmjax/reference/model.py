"""The whole model on one sample, with media, text and drawings; the losses of a step and their gradients."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mmjax.data.tiles import arrange
from mmjax.models.projector.config import ProjectorConfig
from mmjax.reference.arithmetic import Arrays, Leaves, Tables, dense_leaves, module_of, project
from mmjax.reference.callbacks import Calls
from mmjax.reference.decoder import Loads, decode, decode_loss, draw_loss, integrate, speak_losses
from mmjax.reference.edges import edges_into_llm, first_encoder, image_before, media_encoders, nearest_tokens
from mmjax.reference.encoders import encode
from mmjax.reference.latents import latent_encoders, with_latents
from mmjax.reference.lora import merged
from mmjax.reference.masks import masks_of
from mmjax.reference.positions import Grid, token_positions
from mmjax.reference.rotary import rotary_tables
from mmjax.reference.temporal import encode_clip
from mmjax.reference.tiles import in_rows
from mmjax.reference.user_encoder import patches_of, run_encoder

if TYPE_CHECKING:
    from mmjax.data.types import Sample
    from mmjax.models.graph import MultimodalModel
    from mmjax.models.nodes import Edge, Node


_LENGTHS = 16
"""Prompts are padded to a multiple of this length."""


Encoded = dict[str, list[tuple[jax.Array, list[jax.Array]]]]
"""By encoder and medium, or once for all media of a sample: tokens, and outputs of layers that other modules read."""


def _encode_all(leaves: Leaves, model: MultimodalModel, sample: Sample) -> Encoded:
    """Encodes the media of a sample: first each alone, then together by encoders that read other encoders."""
    unknown = set(sample.media) - {*media_encoders(model), *model.generators}
    if unknown:
        raise ValueError(f"Sample.media: {sorted(unknown)} are no encoders of the model; add them to Model.encoders")
    encoded: Encoded = {}
    for name, node in model.encoders.items():
        if name in latent_encoders(model).values():
            continue
        levels, projector = _levels(model, name), node.projector or ProjectorConfig()
        if not model.into(name):
            encoded[name] = [encode(leaves, name, model, medium, levels) for medium in sample.media.get(name, ())]
            if projector.newline:
                encoded[name] = _in_rows(leaves, node, name, sample, [tokens for tokens, _ in encoded[name]])
            continue
        tokens = [tokens for tokens, _ in encoded[model.into(name)[0].source]]
        encoded[name] = [encode_clip(leaves, name, node.config, tokens, levels, projector)] if tokens else []
    return encoded


def _levels(model: MultimodalModel, name: str) -> tuple[int, ...]:
    """The layers whose outputs the edges of an encoder name."""
    return tuple(level for edge in model.out_of(name) for level in edge.levels)


Placements = tuple[list[tuple[np.ndarray, jax.Array]], dict[int, list[tuple[np.ndarray, jax.Array]]]]
"""Indices of placeholders and tokens, by encoder; indices and features added to a layer's input, by LLM layer."""


def _modality_tokens(leaves: Leaves, model: MultimodalModel, sample: Sample, encoded: Encoded) -> Placements:
    """Places encoders' tokens in the text: at the placeholders of the media that they are made of."""
    pieces, injected = [], {}
    for edge in edges_into_llm(model):
        name, features, first = edge.source, encoded[edge.source], first_encoder(model, edge.source)
        positions = np.flatnonzero(sample.placeholders(first)).astype(np.int32)
        count = sum(tokens.shape[0] for tokens, _ in features)
        if count != len(positions):
            raise ValueError(
                f"Sample.tokens: {len(positions)} placeholders of {first!r} for {count} modality tokens; "
                "expand the placeholder of each medium to one per merged token"
            )
        if features:
            pieces.append((positions, jnp.concatenate([tokens for tokens, _ in features])))
            for number, layer in enumerate(edge.inject):
                prefix, x_ND = f"{name}_projector/inject{layer:03d}", pieces[-1][1]
                if edge.levels:
                    x_ND = jnp.concatenate([outputs[number] for _, outputs in features])
                params = dense_leaves({key: leaf for key, leaf in leaves.items() if key.startswith(prefix)})
                projector = model.nodes[name].projector or ProjectorConfig()
                injected.setdefault(layer, []).append((positions, project(params, prefix, x_ND, 1, projector)))
    return pieces, injected


def _in_rows(
    leaves: Leaves, node: Node, name: str, sample: Sample, tokens: Sequence[jax.Array]
) -> list[tuple[jax.Array, list[jax.Array]]]:
    """The LLM's tokens of each image, from the tokens of its thumbnail and its tiles; without outputs of layers."""
    assert node.projector
    remaining, images, sides = list(tokens), [], [medium.shape[:2] for medium in sample.media.get(name, ())]
    newline_D, side = jnp.asarray(leaves[f"{name}_projector/newline"]), node.config.patch * node.config.merge
    for tiled in sample.tiled.get(name, ()):
        count = 1 + tiled.grid[0] * tiled.grid[1]
        tile, parts, remaining = sides[len(tokens) - len(remaining)], remaining[:count], remaining[count:]
        shape = tile[0] // side, tile[1] // side
        images.append((in_rows(parts, shape, tiled.grid, tiled.size, newline_D, node.projector.most_tiles), []))
    return images


def _lookup_ids(model: MultimodalModel, tokens_N: np.ndarray, used_N: np.ndarray) -> np.ndarray:
    """Token ids for a lookup; unused ones become 0, so that a placeholder may be outside the vocabulary."""
    wrong = tokens_N[used_N & ((tokens_N < 0) | (tokens_N >= model.llm.vocab))]
    if wrong.size:
        raise ValueError(f"Decoder.vocab: {model.llm.vocab} does not hold token {wrong[0]}; enlarge the vocabulary")
    return np.where(used_N, tokens_N, 0).astype(np.int32)


def _embedded_ids(model: MultimodalModel, sample: Sample) -> np.ndarray:
    replaced = np.zeros(len(sample.tokens), bool)
    for edge in edges_into_llm(model):
        replaced |= sample.placeholders(first_encoder(model, edge.source))
    return _lookup_ids(model, sample.tokens, ~replaced)


def _positions(model: MultimodalModel, sample: Sample, room: int = 0) -> Int[np.ndarray, "N 3"]:
    """Positions of the sample's tokens, padded with text up to `room` tokens; M-RoPE's if the LLM has it."""
    grids = []
    for name in media_encoders(model) if model.llm.rope_sections else ():
        spec, places = model.encoders[name].module.medium, np.flatnonzero(sample.placeholders(name)).tolist()
        assert spec
        media = list(sample.media.get(name, ())) if spec.axes == 2 else []
        for times in sample.video_times.get(name, ((),) * len(media)):
            rows, columns = (side // spec.patch // spec.merge for side in media[0].shape[:2])
            grids.append(Grid(places[0], rows, columns, times or (0,)))
            media, places = media[len(grids[-1].times) :], places[rows * columns * len(grids[-1].times) :]
    return token_positions(max(room, len(sample.tokens)), grids)


def _tables(model: MultimodalModel, sample: Sample, room: int = 0) -> Tables | None:
    """The rotation tables of M-RoPE; ``None`` for an LLM without it."""
    return rotary_tables(model.llm, _positions(model, sample, room)) if model.llm.rope_sections else None


def _calls(model: MultimodalModel, sample: Sample, tokens: Sequence[int] = (), room: int = 0) -> Calls:
    """The LLM's callbacks for a row with the sample alone, continued with `tokens` and padded to `room` tokens."""
    node, length = model.nodes["llm"], len(sample.tokens) + len(tokens)
    if not node.callbacks.by_place:
        return Calls()
    row = {"tokens": np.append(sample.tokens, tokens), "segments": np.ones(length)}
    positions_N3 = _positions(model, sample, length)
    row["positions"] = positions_N3 if model.llm.rope_sections else positions_N3[:, 0]
    row |= {"targets": row["tokens"][1:], "weights": sample.loss_weights[1:length]}
    padded = {name: _padded(values, max(room, length), 0) for name, values in row.items()}
    for edge in edges_into_llm(model):
        for key, values in _placed(model, edge, sample).items():
            padded[key] = _padded(values, max(room, length), -1 if key == edge.index else 0)
    return Calls(row=padded, callbacks=node.callbacks, module="llm", mask=node.module.mask)


def _placed(model: MultimodalModel, edge: Edge, sample: Sample) -> dict[str, np.ndarray]:
    """The host inputs that assign the tokens of an edge into the LLM to tokens of the sample."""
    name = first_encoder(model, edge.source)
    spec, placeholders = model.nodes[name].medium, sample.placeholders(name)
    assert spec
    grids = [spec.grid(*medium.shape[:-1]) for medium in sample.media.get(name, ())]
    places = arrange(spec, grids, sample.tiled.get(name, ()))
    shape = (len(placeholders), spec.blended)
    index, shares = np.full(shape, -1), np.zeros(shape, np.float32)
    index[placeholders], shares[placeholders] = places
    return {edge.index: index[:, 0]} if spec.blended == 1 else {edge.index: index, edge.shares: shares}


def _padded(values: np.ndarray, room: int, value: int) -> np.ndarray:
    dtype = np.float32 if values.dtype == np.float32 else np.int32
    widths = [(0, room - len(values))] + [(0, 0)] * (values.ndim - 1)
    return np.pad(values, widths, constant_values=value).astype(dtype)


def _llm_leaves(leaves: Leaves) -> Arrays:
    return dense_leaves({name: leaf for name, leaf in leaves.items() if module_of(name) == "llm"})


def sample_logits(leaves: Leaves, model: MultimodalModel, sample: Sample) -> Float[Array, "N V"]:
    """Logits of every position of one sample; logits[t] predict tokens[t + 1].

    `leaves` are logical leaves by name, such as "llm/layers/000/attn/q", complete and possibly sharded; `model` is as
    `build_model(recipe, tokenizer)` gives it.

    Raises ValueError when placeholders and media do not match or a token is outside the vocabulary.
    """
    leaves, model = merged(leaves, model)
    placed = _modality_tokens(leaves, model, sample, _encode_all(leaves, model, sample))
    ids, calls, tables = _embedded_ids(model, sample), _calls(model, sample), _tables(model, sample)
    masks = masks_of(model, sample)
    return decode(_llm_leaves(leaves), model.llm, ids, *placed, calls=calls, tables=tables, masks=masks)


def loss_sum(leaves: Leaves, model: MultimodalModel, sample: Sample) -> Float[Array, ""]:
    """Sum over t >= 1 of loss_weights[t] * cross-entropy of tokens[t] given tokens[:t], without a denominator.

    `leaves` are logical leaves by name, such as "llm/layers/000/attn/q", complete and possibly sharded; `model` is as
    `build_model(recipe, tokenizer)` gives it. tokens[0] is not predicted, so loss_weights[0] counts neither here nor in
    a denominator. Raises ValueError when placeholders and media do not match or a token is outside the vocabulary.
    """
    leaves, model = merged(leaves, model)
    return _text(leaves, model, sample, _encode_all(leaves, model, sample))[0]["loss"]


def _text(
    leaves: Leaves, model: MultimodalModel, sample: Sample, encoded: Encoded
) -> tuple[dict[str, jax.Array], Loads, jax.Array]:
    weights = np.append(sample.loss_weights[1:], np.float32(0))
    targets = _lookup_ids(model, np.append(sample.tokens[1:], 0), weights != 0)
    placed = _modality_tokens(leaves, model, sample, encoded)
    return decode_loss(
        _llm_leaves(leaves),
        model.llm,
        _embedded_ids(model, sample),
        *placed,
        targets_N=targets,
        weights_N=weights,
        calls=_calls(model, sample),
        tables=_tables(model, sample),
        masks=masks_of(model, sample),
    )


def loss_sums(leaves: Leaves, model: MultimodalModel, sample: Sample) -> dict[str, Float[Array, ""]]:
    """The sums of all losses by name, "<module>/<loss>", as scalars without weights and denominators.

    `leaves` are logical leaves by name, such as "llm/layers/000/attn/q", complete and possibly sharded; `model` is as
    `build_model(recipe, tokenizer)` gives it. "llm/loss" is `loss_sum`, with `Decoder.z_loss` there is "llm/z_loss",
    and with experts "llm/balance_loss" and "llm/router_z_loss" if they have a weight; "painter/loss" is the sum of
    `draw_loss` over the pictures of the generator "painter", if the sample has noise for it; encoders of the user's own
    may have losses too.

    Raises ValueError as `sample_logits` does, or if placeholders do not match the pictures to be drawn.
    """
    return _loss_sums(leaves, model, sample)[0]


def _loss_sums(leaves: Leaves, model: MultimodalModel, sample: Sample) -> tuple[dict[str, jax.Array], Loads]:
    """`loss_sums`, and the loads of experts by leaf of the router's bias."""
    leaves, model = merged(leaves, model)
    sample = with_latents(leaves, model, sample)
    encoded = _encode_all(leaves, model, sample)
    text, loads, hidden_ND = _text(leaves, model, sample, encoded)
    losses = {f"llm/{name}": value for name, value in text.items()}
    for name in (name for name, node in model.generators.items() if node.medium and node.medium.codes):
        for codes in sample.media.get(name, ()):
            spoken, spoken_loads = _speak(leaves, model, sample, name, codes[:, 0], hidden_ND)
            for key, value in spoken.items():
                losses[f"{name}/{key}"] = losses.get(f"{name}/{key}", 0.0) + value
            loads = {**loads, **{leaf: loads.get(leaf, 0) + load for leaf, load in spoken_loads.items()}}
    for name in (name for name in model.generators if name in sample.noise):
        dit, key = model.generators[name].config, f"{name}/loss"
        projector = model.generators[name].projector or ProjectorConfig()
        losses[key] = jnp.zeros((), hidden_ND.dtype)
        drawn = zip(sample.media[name], sample.noise[name], sample.times[name], strict=True)
        conditions = _conditions(model, sample, name, hidden_ND, encoded)
        dropped = sample.dropped.get(name) or [False] * len(sample.media[name])
        followed = sample.references.get(name) or [()] * len(sample.media[name])
        for (condition, further), (picture, noise, time), is_dropped, references in zip(
            conditions, drawn, dropped, followed, strict=True
        ):
            condition = jnp.zeros_like(condition) if is_dropped else condition
            loss = draw_loss(leaves, name, dit, condition, picture, noise, time, projector, further, references)
            losses[key] = losses[key] + loss
    for name in (name for name, node in model.encoders.items() if node.module.losses):
        for medium in sample.media.get(name, ()):
            for key, value in run_encoder(leaves, name, model, medium)[2].items():
                losses[f"{name}/{key}"] = losses.get(f"{name}/{key}", 0.0) + value
    return losses, loads


def _speak(
    leaves: Leaves, model: MultimodalModel, sample: Sample, name: str, codes_N: np.ndarray, hidden_ND: jax.Array
) -> tuple[dict[str, Float[Array, ""]], Loads]:
    """The sums of the losses of the codes with which the generator `name` speaks the sample's last answer, and loads
    of experts.
    """
    answer = range(sample.prompt, len(sample.tokens))
    places = np.asarray([answer[number * len(answer) // len(codes_N)] for number in range(len(codes_N))])
    projector = model.generators[name].projector or ProjectorConfig()
    return speak_losses(leaves, name, model.generators[name].config, hidden_ND[places], codes_N, projector)


def _conditions(
    model: MultimodalModel, sample: Sample, name: str, hidden_ND: jax.Array, encoded: Encoded
) -> Iterator[tuple[Float[Array, "M D"], dict[str, Float[Array, "M E"]]]]:
    """For each picture that the generator `name` draws: the hidden states of its placeholders, and by encoder the
    tokens that the generator reads too, in the order of the placeholders.
    """
    dit = model.generators[name].config
    positions, first = np.flatnonzero(sample.placeholders(name)), 0
    for picture in sample.media[name]:
        sides = [-(-side // (dit.patch * dit.merge)) for side in picture.shape[: picture.ndim - 1]]
        count = dit.queries or math.prod(sides)
        at = positions[first : first + count]
        encoders = [edge.source for edge in model.into(name) if edge.source in model.encoders and not edge.latents]
        yield hidden_ND[at], {source: _seen(model, sample, source, encoded, at[0], sides) for source in encoders}
        first += count
    if first != len(positions):
        raise ValueError(f"Sample.tokens: {len(positions)} placeholders of {name!r} for {first} tokens of pictures")


def _seen(
    model: MultimodalModel, sample: Sample, encoder: str, encoded: Encoded, start: int, sides: Sequence[int]
) -> Float[Array, "M E"]:
    """The tokens of an encoder's last image before token `start` that lie nearest to those of a drawing there.

    `sides` are the drawing's rows and columns of tokens. Without such an image all features are 0.
    """
    number, spec = image_before(model, sample, encoder, start), model.nodes[encoder].module.medium
    assert spec
    if number is None:
        return jnp.zeros((sides[0] * sides[1], model.token_width(encoder)))
    image_sides = [side // spec.block for side in sample.media[encoder][number].shape[:2]]
    return encoded[encoder][number][0][nearest_tokens(sides, image_sides)]


def draw(leaves: Leaves, model: MultimodalModel, sample: Sample, name: str) -> list[Float[np.ndarray, "T X"]]:
    """Makes each picture of the generator `name` from the sample's noise, as patches, by Euler's method.

    One array [T, patch² · channels] for each picture, its patches in the order of `patch_positions`. `leaves` are
    logical leaves by name, such as "painter/patch/kernel", of the whole model, which `build_model(recipe, tokenizer)`
    gives; `name` is such as "painter". Raises ValueError as `loss_sums` does.
    """
    leaves, model = merged(leaves, model)
    dit, pictures, projector = model.generators[name].config, [], model.generators[name].projector or ProjectorConfig()
    encoded = _encode_all(leaves, model, sample)
    *_, hidden_ND = _text(leaves, model, sample, encoded)
    conditions = _conditions(model, sample, name, hidden_ND, encoded)
    followed = sample.references.get(name) or [()] * len(sample.noise[name])
    for (condition, further), noise, references in zip(conditions, sample.noise[name], followed, strict=True):
        pictures.append(integrate(leaves, name, dit, condition, noise, projector, further, references))
    return pictures


def denominators(model: MultimodalModel, samples: Sequence[Sample]) -> dict[str, float]:
    """Denominators of a step's losses, by name: {"llm": 60.0, "samples": 4.0, "llm_tokens": 80.0, "media": 4.0}.

    `model` is as `build_model(recipe, tokenizer)` gives it, and `samples` are all of the step. "llm" is the sum of loss
    weights, without those of first tokens; a generator's name has the number of drawn values, and the name of an
    encoder with a loss its number of patches; "samples", "llm_tokens" and "media" are numbers of these.
    """
    text = float(sum(sample.loss_weights[1:].sum(dtype=np.float64) for sample in samples))
    names = (*(name for name in model.encoders if name not in latent_encoders(model).values()), *model.generators)
    media = {name: [m for s in samples for m in s.media.get(name, ())] for name in names}
    counts = {"samples": len(samples), "llm_tokens": sum(len(sample.tokens) for sample in samples)}
    counts["media"] = sum(map(len, media.values()))
    counts |= {name: sum(m.size for m in media[name]) for name in model.generators}
    with_loss = {name: node for name, node in model.encoders.items() if node.module.losses}
    counts |= {name: sum(patches_of(node, m) for m in media[name]) for name, node in with_loss.items()}
    return {"llm": text} | {name: float(count) for name, count in counts.items()}


def _weights_and_counts(model: MultimodalModel, samples: Sequence[Sample]) -> tuple[dict[str, float], dict[str, float]]:
    """The weights and the denominators of all losses."""
    totals = denominators(model, samples)
    weights, counts = {"llm/loss": 1.0}, {"llm/loss": totals["llm"]}
    if model.llm.z_loss:
        weights["llm/z_loss"], counts["llm/z_loss"] = model.llm.z_loss, totals["llm"]
    for name, node in {"llm": model.nodes["llm"], **model.generators}.items():
        if getattr(node.config, "experts", 0):
            tokens = totals["llm_tokens" if name == "llm" else name]
            for key in ("balance_loss", "router_z_loss"):
                if weight := getattr(node.config, key):
                    weights[f"{name}/{key}"], counts[f"{name}/{key}"] = weight, tokens
    for name, generator in model.generators.items():
        for key, loss in generator.module.losses.items():
            weights[f"{name}/{key}"], counts[f"{name}/{key}"] = loss.weight, totals[name]
    for name, encoder in model.encoders.items():
        for key, loss in encoder.module.losses.items():
            weights[f"{name}/{key}"], counts[f"{name}/{key}"] = loss.weight, totals[loss.per or name]
    return weights, counts


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossAndGradients:
    """Loss of a step, its parts by name, and the gradients of all leaves of modules that are not frozen.

    Attributes:
      loss: the weighted sum of `losses`.
      losses: each loss over its denominator, without its weight, by names such as "llm/loss".
      gradients: by leaf, of the leaf's shape and dtype.
      loads: by leaf of a router's bias, whose gradient is 0, the number of the step's tokens that chose each expert.
    """

    loss: float
    losses: dict[str, float]
    gradients: dict[str, np.ndarray]
    loads: dict[str, np.ndarray]


def step_loss_and_gradients(
    leaves: Leaves, model: MultimodalModel, samples: Sequence[Sample], *, frozen: Collection[str] = ()
) -> LossAndGradients:
    """Loss of a step and its gradients, unclipped.

    The loss is the text's (weighted cross-entropies over the sum of the weights), plus each generator's (squared errors
    over the number of drawn values) times its `loss_weight`, plus further losses with their weights (see
    `denominators`). A loss with the denominator 0 counts as 0. `leaves` are logical leaves by name, such as
    "llm/embed", `model` is as `build_model(recipe, tokenizer)` gives it, and `samples` are all of the step. Samples are
    differentiated one by one and summed in float64. Gradients have the leaves' dtype; the modules named in `frozen`,
    such as "vision_projector", have none.

    Raises ValueError when every denominator is 0, and as `loss_sums` does.
    """
    weights, counts = _weights_and_counts(model, samples)
    if not any(counts[name] for name, weight in weights.items() if weight):
        raise ValueError("Sample.loss_weights: they sum to 0 over the step; give at least one token a weight")
    base = counts["llm/loss"] or 1.0  # so that a single loss has the factor 1
    factors = {name: weights[name] * base / count if count else 0.0 for name, count in counts.items()}
    leaves = dense_leaves(leaves)
    trained = {name: leaf for name, leaf in leaves.items() if module_of(name) not in frozen}

    def weighted(part: Leaves, sample: Sample) -> tuple[jax.Array, tuple[dict[str, jax.Array], Loads]]:
        sums, loads = _loss_sums({**leaves, **part}, model, sample)
        return jnp.sum(jnp.stack([factors[name] * value for name, value in sums.items()])), (sums, loads)

    differentiate = jax.value_and_grad(weighted, has_aux=True)
    sums, total = dict.fromkeys(counts, 0.0), {name: np.zeros(leaf.shape, np.float64) for name, leaf in trained.items()}
    all_loads: dict[str, np.ndarray] = {}
    for sample in samples:
        (_, (sample_sums, loads)), gradients = differentiate(trained, sample)
        for name, load in loads.items():
            all_loads[name] = all_loads.get(name, np.zeros(load.shape)) + np.asarray(load)
        for name, value in sample_sums.items():
            sums[name] += float(value)
        for name, gradient in gradients.items():
            total[name] += np.asarray(gradient, np.float64)
    losses = {name: value / counts[name] if counts[name] else 0.0 for name, value in sums.items()}
    mean = {name: (value / base).astype(trained[name].dtype) for name, value in total.items()}
    loss = sum(weights[name] * value for name, value in losses.items())
    loads = {name: load for name, load in all_loads.items() if name in trained}
    return LossAndGradients(loss=loss, losses=losses, gradients=mean, loads=loads)


def greedy(leaves: Leaves, model: MultimodalModel, sample: Sample, *, max_new: int, eos: int) -> list[int]:
    """Greedy continuation of tokens[:sample.prompt]: at most `max_new` token ids; the token `eos` ends it and is left
    out.

    `leaves` are logical leaves by name, such as "llm/embed"; `model` is as `build_model(recipe, tokenizer)` gives it.
    Every token computes the complete sequence again, padded to one of few lengths so that few programs are compiled; no
    position sees later ones. A placeholder id that the model emits is embedded like any other token. Raises ValueError
    as `sample_logits` does.
    """
    leaves, model = merged(leaves, model)
    prompt = dataclasses.replace(sample, tokens=sample.tokens[: sample.prompt])
    llm, ids = _llm_leaves(leaves), _embedded_ids(model, prompt)
    placed = _modality_tokens(leaves, model, prompt, _encode_all(leaves, model, prompt))
    new: list[int] = []
    room = -(-(len(ids) + max_new) // _LENGTHS) * _LENGTHS
    tables, masks = _tables(model, prompt, room), masks_of(model, prompt, room)
    while len(new) < max_new:
        tokens = np.append(ids, new).astype(np.int32)
        padded, calls = np.pad(tokens, (0, room - len(tokens))), _calls(model, prompt, new, room)
        logits = decode(llm, model.llm, padded, *placed, calls=calls, tables=tables, masks=masks)
        best = int(np.argmax(logits[len(tokens) - 1]))
        if best == eos:
            break
        new.append(best)
    return new
