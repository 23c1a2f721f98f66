"""Whole samples: media, text and drawings together; the losses of a step and their gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mmjax.reference.arithmetic import Arrays, Leaves, dense_leaves, module_of, project
from mmjax.reference.decoder import decode, decode_loss, draw_loss, integrate
from mmjax.reference.encoders import encode

if TYPE_CHECKING:
    from mmjax.data.types import Sample
    from mmjax.models.graph import MultimodalModel


_LENGTHS = 16
"""Sequences that are continued are padded to a multiple of this length."""


def _modality_tokens(
    leaves: Leaves, model: MultimodalModel, sample: Sample
) -> tuple[list[tuple[np.ndarray, jax.Array]], dict[int, list[tuple[np.ndarray, jax.Array]]]]:
    """Placeholder positions and the modality tokens that are placed there, for each encoder with media.

    Then, by LLM layer, the same for the features that are added to the layer's input.
    """
    unknown = set(sample.media) - {*model.encoders, *model.generators}
    if unknown:
        raise ValueError(f"Sample.media: {sorted(unknown)} are no encoders of the model; add them to Model.encoders")
    pieces, injected = [], {}
    for name in model.encoders:
        positions = np.flatnonzero(sample.placeholders(name)).astype(np.int32)
        features = [encode(leaves, name, model, medium) for medium in sample.media.get(name, ())]
        count = sum(feature.shape[0] for feature in features)
        if count != len(positions):
            raise ValueError(
                f"Sample.tokens: {len(positions)} placeholders of {name!r} for {count} modality tokens; "
                "expand the placeholder of each medium to one per merged token"
            )
        if features:
            pieces.append((positions, jnp.concatenate(features)))
            for layer in (layer for edge in model.out_of(name) for layer in edge.inject):
                prefix = f"{name}_projector/inject{layer:03d}"
                own = dense_leaves({key: leaf for key, leaf in leaves.items() if key.startswith(prefix)})
                injected.setdefault(layer, []).append((positions, project(own, prefix, pieces[-1][1], 1)))
    return pieces, injected


def _lookup_ids(model: MultimodalModel, tokens_N: np.ndarray, used_N: np.ndarray) -> np.ndarray:
    """Token ids for a lookup; unused ones become 0, so that a placeholder may lie outside the vocabulary."""
    wrong = tokens_N[used_N & ((tokens_N < 0) | (tokens_N >= model.llm.vocab))]
    if wrong.size:
        raise ValueError(f"Decoder.vocab: {model.llm.vocab} does not hold token {wrong[0]}; enlarge the vocabulary")
    return np.where(used_N, tokens_N, 0).astype(np.int32)


def _embedded_ids(model: MultimodalModel, sample: Sample) -> np.ndarray:
    replaced = np.zeros(len(sample.tokens), bool)
    for name in model.encoders:
        replaced |= sample.placeholders(name)
    return _lookup_ids(model, sample.tokens, ~replaced)


def _llm_leaves(leaves: Leaves) -> Arrays:
    return dense_leaves({name: leaf for name, leaf in leaves.items() if module_of(name) == "llm"})


def sample_logits(leaves: Leaves, model: MultimodalModel, sample: Sample) -> Float[Array, "N V"]:
    """Logits of every position of one sample; logits[t] predict tokens[t + 1].

    Raises ValueError when placeholders and media do not match or a token is outside the vocabulary.
    """
    placed = _modality_tokens(leaves, model, sample)
    return decode(_llm_leaves(leaves), model.llm, _embedded_ids(model, sample), *placed)


def loss_sum(leaves: Leaves, model: MultimodalModel, sample: Sample) -> Float[Array, ""]:
    """Sum over t >= 1 of loss_weights[t] * cross-entropy of tokens[t] given tokens[:t]; not divided by anything.

    Nothing predicts tokens[0], so loss_weights[0] counts neither here nor in a denominator. Raises ValueError as
    `sample_logits` does.
    """
    return _text(leaves, model, sample)[0]


def _text(leaves: Leaves, model: MultimodalModel, sample: Sample) -> tuple[jax.Array, jax.Array]:
    weights = np.append(sample.loss_weights[1:], np.float32(0))
    targets = _lookup_ids(model, np.append(sample.tokens[1:], 0), weights != 0)
    placed = _modality_tokens(leaves, model, sample)
    return decode_loss(_llm_leaves(leaves), model.llm, _embedded_ids(model, sample), *placed, targets, weights)


def loss_sums(leaves: Leaves, model: MultimodalModel, sample: Sample) -> dict[str, Float[Array, ""]]:
    """`loss_sum` under "llm"; under each generator that the sample has noise for, the sum of its `draw_loss`es.

    Raises ValueError as `sample_logits` does, or where placeholders do not match the pictures to be drawn.
    """
    text, hidden_ND = _text(leaves, model, sample)
    losses = {"llm": text}
    for name in (name for name in model.generators if name in sample.noise):
        dit, losses[name] = model.generators[name].config, jnp.zeros((), text.dtype)
        drawn = zip(sample.media[name], sample.noise[name], sample.times[name], strict=True)
        for own, (picture, noise, time) in zip(_conditions(model, sample, name, hidden_ND), drawn, strict=True):
            losses[name] = losses[name] + draw_loss(leaves, name, dit, own, picture, noise, time)
    return losses


def _conditions(
    model: MultimodalModel, sample: Sample, name: str, hidden_ND: jax.Array
) -> Iterator[Float[Array, "M D"]]:
    """The hidden states of the placeholders of each picture that generator `name` is to draw."""
    dit = model.generators[name].config
    positions, first = np.flatnonzero(sample.placeholders(name)), 0
    for picture in sample.media[name]:
        count = (picture.shape[0] // dit.patch) * (picture.shape[1] // dit.patch) // dit.merge**2
        yield hidden_ND[positions[first : first + count]]
        first += count
    if first != len(positions):
        raise ValueError(f"Sample.tokens: {len(positions)} placeholders of {name!r} for {first} tokens of pictures")


def draw(leaves: Leaves, model: MultimodalModel, sample: Sample, name: str) -> list[Float[np.ndarray, "T X"]]:
    """The patches of each picture that generator `name` makes of the sample's noise, by Euler's method.

    Raises ValueError as `loss_sums` does.
    """
    dit, pictures = model.generators[name].config, []
    hidden_ND = _text(leaves, model, sample)[1]
    for own, noise in zip(_conditions(model, sample, name, hidden_ND), sample.noise[name], strict=True):
        pictures.append(integrate(leaves, name, dit, own, noise))
    return pictures


def denominators(model: MultimodalModel, samples: Sequence[Sample]) -> dict[str, float]:
    """Denominators of a step's losses: the sum of loss weights under "llm", the number of drawn values by generator."""
    text = float(sum(sample.loss_weights[1:].sum(dtype=np.float64) for sample in samples))
    drawn = {name: sum(m.size for s in samples for m in s.media.get(name, ())) for name in model.generators}
    return {"llm": text} | {name: float(count) for name, count in drawn.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossAndGradients:
    """Loss of a step, its parts by module, and the gradient of every leaf that is not of a frozen module."""

    loss: float
    losses: dict[str, float]
    gradients: dict[str, np.ndarray]


def step_loss_and_gradients(
    leaves: Leaves, model: MultimodalModel, samples: Sequence[Sample], *, frozen: Collection[str] = ()
) -> LossAndGradients:
    """Loss of a step and its gradients, unclipped.

    The loss is the text's (weighted cross-entropies over the sum of the weights), plus each generator's (squared errors
    over the numbers drawn) times its `loss_weight`; one whose denominator is 0 counts nothing. Samples are
    differentiated one by one and summed in float64; gradients come back in the leaves' dtype, frozen modules are left
    out. Raises ValueError when every denominator is 0, and as `loss_sums` does.
    """
    wholes = denominators(model, samples)
    if not any(wholes.values()):
        raise ValueError("Sample.loss_weights: they sum to 0 over the step; give at least one token a weight")
    weights = {"llm": 1.0} | {name: generator.config.loss_weight for name, generator in model.generators.items()}
    base = wholes["llm"] or 1.0  # so that a single loss is differentiated as it is
    factors = {name: weights[name] * base / whole if whole else 0.0 for name, whole in wholes.items()}
    leaves = dense_leaves(leaves)
    trained = {name: leaf for name, leaf in leaves.items() if module_of(name) not in frozen}

    def weighted(part: Leaves, sample: Sample) -> tuple[jax.Array, dict[str, jax.Array]]:
        sums = loss_sums({**leaves, **part}, model, sample)
        return jnp.sum(jnp.stack([factors[name] * value for name, value in sums.items()])), sums

    differentiate = jax.value_and_grad(weighted, has_aux=True)
    sums, total = dict.fromkeys(wholes, 0.0), {name: np.zeros(leaf.shape, np.float64) for name, leaf in trained.items()}
    for sample in samples:
        (_, found), gradients = differentiate(trained, sample)
        for name, value in found.items():
            sums[name] += float(value)
        for name, gradient in gradients.items():
            total[name] += np.asarray(gradient, np.float64)
    losses = {name: value / wholes[name] if wholes[name] else 0.0 for name, value in sums.items()}
    mean = {name: (value / base).astype(trained[name].dtype) for name, value in total.items()}
    loss = sum(weights[name] * value for name, value in losses.items())
    return LossAndGradients(loss=loss, losses=losses, gradients=mean)


def greedy(leaves: Leaves, model: MultimodalModel, sample: Sample, *, max_new: int, eos: int) -> list[int]:
    """Greedy, free-running continuation of tokens[:sample.prompt]: at most `max_new` ids, without `eos`.

    The whole sequence is computed again for every token, padded to one of few lengths, so that few programs are
    compiled: no position sees those after it. A placeholder id that the model itself emits is embedded like any other
    token. Raises ValueError as `sample_logits` does.
    """
    prompt = dataclasses.replace(sample, tokens=sample.tokens[: sample.prompt])
    llm, placed, ids = _llm_leaves(leaves), _modality_tokens(leaves, model, prompt), _embedded_ids(model, prompt)
    new: list[int] = []
    room = -(-(len(ids) + max_new) // _LENGTHS) * _LENGTHS
    while len(new) < max_new:
        tokens = np.append(ids, new).astype(np.int32)
        logits = decode(llm, model.llm, np.pad(tokens, (0, room - len(tokens))), *placed)
        best = int(np.argmax(logits[len(tokens) - 1]))
        if best == eos:
            break
        new.append(best)
    return new
