"""Settings of Llama-family language models. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from mmjax.attention.language import Rules
from mmjax.attention.settings import check_backend
from mmjax.configurable import configurable, divides, not_negative, one_of, positive, require, setting_name
from mmjax.data.patches import FIRST_CODE
from mmjax.mesh.layout import Layout
from mmjax.models.choices import ACTIVATIONS, REMATS
from mmjax.models.delta.config import DELTA_SETTINGS, DeltaSizes
from mmjax.models.llama.checks import ROPE_TURNS, DecoderChecks
from mmjax.models.llama.presets import PRESETS
from mmjax.models.llama.runs import PROPORTIONAL, LayerRun
from mmjax.models.settings import ModuleSettings

EXPERT_SETTINGS = (
    *("experts_per_token", "expert_mlp", "shared_experts", "shared_gate", "dense_layers", "balance_loss"),
    *("router", "router_normalised", "router_scale", "router_groups", "router_group_limit", "router_bias"),
    *("router_bias_rate", "router_z_loss", "expert_capacity", "expert_buffer"),
    *("mlp_beside_experts", "router_norm", "expert_scale"),
)
"""Settings that have no effect without experts."""
_NOT_NEGATIVE = (
    *("experts", "expert_mlp", "expert_capacity", "expert_buffer", "shared_experts", "dense_layers", "balance_loss"),
    *("router_bias_rate", "router_z_loss", "kv_rank", "q_rank", "nope_head_dim", "rope_head_dim", "v_head_dim"),
    *("rope_mscale", "rope_mscale_all", "delta_heads", "delta_value_heads", "local_rope_theta", "score_width"),
    *("score_cap", "logit_cap", "vocab", "head_dim", "window", "chunk", "full_layers", "full_every", "rope_context"),
    *("z_loss", "nope_every", "global_head_dim", "global_kv_heads", "kv_shared_layers", "kv_shared_mlp"),
    "per_layer_width",
)
LATENT_SETTINGS = ("q_rank", "nope_head_dim", "rope_head_dim", "v_head_dim", "rope_mscale", "rope_mscale_all")
"""Settings that have no effect without ``kv_rank``."""


@configurable("Decoder")
@dataclass(frozen=True, kw_only=True)
class DecoderConfig(DecoderChecks, ModuleSettings):
    """A language model.

    Attributes:
      preset: the preset whose values are the defaults.
      layers, width, heads, kv_heads, mlp: depth, model width, query heads, key/value heads, hidden units.
      head_dim: width of one head; 0 means width / heads.
      global_head_dim, global_kv_heads: width of one head, and key/value heads, of layers without the window and chunks;
        0 means as in other layers (Gemma 4).
      kv_shared_layers: number of last layers without keys and values of their own: they read those of the last layer
        before them of their kind, with or without the window (Gemma 4 E2B). A pipeline stage with one of them has these
        layers too.
      kv_shared_mlp: hidden units of the mlp of these layers; 0 means as in other layers.
      per_layer_width: width of what each layer reads beside its input: a token's row of a table of this layer's, and a
        normed product of the embeddings. A layer multiplies it by a gate, and adds the normed product (Gemma 4 E2B and
        E4B). Such a model is not cut into stages. 0 is none.
      per_layer_media: the token whose rows of these tables images and recordings have, and which are not trained, as of
        padding in ``transformers``; -1 is none, and they have zeros.
      vocab: vocabulary size; 0 means the tokenizer's.
      kv_rank: with a number above 0 attention is multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", §2.1): a
        token's keys and values are products of a normed latent of this width, and each head has a key of its own
        beside one that all heads share, which alone is rotated; 0 is none.
      q_rank: width of the normed latent from which queries are products; 0 makes them of the features (V2-Lite).
      nope_head_dim: width of a head's queries and keys without position.
      rope_head_dim: width of a head's queries, and of the shared key, that is rotated, by pairs of neighbours.
      v_head_dim: width of a head's values; 0 means ``nope_head_dim``.
      qkv_bias, o_bias, mlp_bias: queries, keys and values, the attention's output, and the mlp have biases.
      qk_norm: whether queries and keys have a norm for each head, before rotary embedding (Qwen3).
      qk_norm_whole: whether that norm is one of all heads together, of queries and of keys (OLMo 2).
      v_norm: whether values have a norm for each head, without a weight (Gemma 4).
      keys_as_values: whether layers without the window and chunks have no product for values, which are keys in front
        of their norm and rotation (Gemma 4).
      norm_plus_one: whether norms multiply by 1 + their weight, which is initially 0; the gated norm of delta layers
        does not (Qwen3.5, Gemma).
      pre_norms: whether the inputs of attention, or of the delta rule, and of the mlp are normed; without them
        ``post_norms`` are the only norms of a layer (OLMo 2).
      post_norms: whether the results of attention, or of the delta rule, and of the mlp have a norm each before they
        are added to the layer's input (Gemma 2, 3 and 4).
      layer_scalar: whether a layer's output is multiplied by a number of its own, which training does not change
        (Gemma 4).
      activation: activation of the mlp's gate: ``silu``, ``gelu`` (tanh, Gemma), ``gelu_exact`` or ``quick_gelu``.
      scaled_embed: whether embeddings of tokens, not those of media, are multiplied by the root of ``width``, rounded
        to the run's dtype (Gemma).
      score_width: scores of attention are divided by its root; 0 means a head's width (Gemma's query_pre_attn_scalar).
      score_cap, logit_cap: with c above 0 a score of attention, or a logit of the vocabulary, x becomes
        c · tanh(x / c) (Gemma 2); 0 leaves it.
      attention_gate: whether attention's output is multiplied by the sigmoid of a gate, a second product of the
        features as wide as queries, whose columns stand behind each head's query (Qwen3.5).
      delta_heads: with a number above 0 all layers but each ``attention_every``th are gated delta networks (Yang et
        al., "Gated Delta Networks", 2025): a head keeps a matrix of fixed size in place of keys and values. It is the
        number of heads of queries and keys; 0 is none.
      delta_value_heads: heads of values, of which a key head has one or several; 0 means ``delta_heads``.
      delta_key_dim, delta_value_dim: width of one head's queries and keys in delta layers, and of its values.
      delta_taps: tokens that the convolution of a delta layer's queries, keys and values reads, itself included.
      attention_every: the last of each run of so many layers has attention, the others the delta rule; 1 is all.
      mask: the attention mask: "causal", another preset such as "gemma3" and "paligemma", or rules such as "text sees
        all before; vision sees vision in item" (see docs/guide/masks.md).
      window: sliding window of earlier tokens, the token itself included; 0 means no limit (Mistral).
      chunk: length of the chunks that samples are cut into: a token sees its own chunk, and by the relation "in item"
        its whole item; 0 means one chunk (Llama 4).
      full_layers: number of first layers without window and chunks (Qwen2).
      full_every: the last of each run of so many layers has no window and no chunks, such as 6 for five local layers
        and a global one (Gemma 3).
      full_causal: whether layers without the window and chunks are causal, whatever ``mask`` shows (Gemma 4).
      rope_theta: base of the rotary frequencies.
      local_rope_theta: base of the frequencies of layers with the window or chunks, which ``rope_scaling`` does not
        change then; 0 means as in other layers (Gemma 3).
      nope_every: the last of each run of so many layers does not rotate queries and keys, such as 4 (SmolLM3); 0 is
        none.
      rope_share: share of a head's components that are rotated, the first ones (Qwen3.5: 0.25).
      rope_scaling: change of frequencies for longer contexts: ``none``, ``linear`` (all are divided), ``llama3`` (Llama
        3.1) or ``yarn`` (Peng et al., "YaRN"), which divide low frequencies and keep high ones. ``proportional``
        divides all, and ``rope_share`` is the share of a whole head's pairs that rotate, those of high frequencies; in
        layers with ``local_rope_theta`` all do (Gemma 4).
      rope_factor: divisor of the frequencies.
      rope_context: context length before scaling, in tokens, for ``llama3`` and ``yarn``.
      rope_turns: ``llama3`` and ``yarn`` divide frequencies with fewer turns in that context than the first number,
        keep those with more than the second, and interpolate between; () means (1, 4) for ``llama3``, (1, 32) for
        ``yarn``.
      rope_mscale, rope_mscale_all: of latent attention under ``yarn`` rotated queries and keys are multiplied by
        m(``rope_mscale``) / m(``rope_mscale_all``), and scores by m(``rope_mscale_all``)², where m(x) is
        1 + 0.1 x ln(``rope_factor``).
      rope_sections: numbers of a head's pairs of components that rotate with a token's time, row and column: M-RoPE
        (Wang et al., "Qwen2-VL", §2.1), such as (16, 24, 24). A text token has one number for all three, an image's
        token its place in the image. () rotates all pairs with the token's place in its sample.
      rope_interleaved: whether the three kinds of pairs alternate, as in Qwen3-VL: pairs 1, 4, 7, … rotate with the row
        and pairs 2, 5, 8, … with the column, as many as ``rope_sections`` says, all others with the time. Otherwise
        the sections lie behind one another.
      norm_eps: epsilon of RMSNorm.
      tied: whether the output head is the transposed embedding table.
      experts: number of experts of each layer that has them; 0 means none (Shazeer et al., "Sparsely-gated
        mixture-of-experts layer"). Each is an mlp; a router sends every token to some of them.
      experts_per_token: number of experts that compute a token.
      expert_mlp: hidden units of one expert; 0 means as ``mlp``.
      shared_experts: number of experts that compute every token, as one mlp with so many times ``expert_mlp`` hidden
        units (DeepSeek, Qwen2-MoE).
      shared_gate: whether the result of shared experts is multiplied by a sigmoid of each token (Qwen2-MoE).
      dense_layers: number of first layers with an mlp in place of experts (DeepSeek).
      mlp_beside_experts: whether layers with experts have the mlp too, and add both results; each has a norm then, and
        so have the features that experts read (Gemma 4).
      router_norm: whether the router reads the layer's features with a norm of its own, over the root of ``width``
        (Gemma 4).
      expert_scale: whether each expert's result is multiplied by a number that is learned (Gemma 4).
      expert_capacity: the most choices of a sample that an expert computes, over their mean number under equal loads,
        such as 1.25 (Lepikhin et al., "GShard"): first choices of all tokens come before second ones, each in the order
        of tokens; others are dropped and counted in "router_dropped". 0 drops none, as generated text does.
      expert_buffer: with Layout.ep_way='all-to-all', tokens that two ranks exchange, and rows of a rank's experts, over
        their mean numbers under equal loads, such as 1.5; choices of experts that do not fit are dropped and counted
        in "router_dropped". 0 is the worst case, in which none is.
      router: how scores become probabilities: ``softmax`` over all experts, or ``sigmoid`` of each (DeepSeek-V3).
      router_normalised: whether the probabilities of a token's experts are divided by their sum.
      router_scale: factor of these probabilities.
      router_groups: number of groups of experts from which ``router_group_limit`` are chosen first, by their best
        expert, with ``sigmoid`` by the sum of the best two; 1 leaves them out (DeepSeek-V2 and V3).
      router_group_limit: number of groups in which a token's experts are.
      router_bias: whether each expert has a bias for its choice, which is not in its weight and has no gradient: after
        a step it rises by ``router_bias_rate`` for an expert with fewer tokens than the mean, and falls otherwise
        (Wang et al., "Auxiliary-loss-free load balancing").
      router_bias_rate: the change of that bias in a step.
      balance_loss: weight of the loss that makes the loads of experts equal, Σ_e f_e · P_e times their number, where
        f_e is the share of a sample's tokens that choose expert e and P_e their mean probability of it (Fedus et al.,
        "Switch transformers", §2.2); the mean over layers and, weighted by tokens, over samples. 0 leaves it out.
      router_z_loss: weight of the squared logarithm of the router's denominator (Zoph et al., "ST-MoE", §3.2), the
        mean over tokens and layers; 0 leaves it out.
      z_loss: weight of a second loss, the squared logarithm of the softmax's denominator, which keeps logits small
        (Chowdhery et al., "PaLM", §5); 0 leaves it out.
      attention: the attention backend: ``blockwise`` (any mask, any device), ``cudnn``, ``dense`` (all pairs of tokens
        at once), or ``auto``: cuDNN where it supports device, mask and shape, else blockwise.
      remat: the checkpoint policy: ``none`` recomputes nothing, ``dots`` saves products, ``full`` recomputes all;
        ``auto`` is none on CPUs, and on GPUs the first of them whose estimated memory fits.
    """

    presets: ClassVar[Mapping[str, Mapping[str, object]]] = PRESETS
    divided_by_tp: ClassVar[tuple[str, ...]] = (
        "heads",
        "kv_heads",
        "global_kv_heads",
        "mlp",
        "kv_shared_mlp",
        "width",
        "delta_heads",
    )
    divided_by_expert_tp: ClassVar[tuple[str, ...]] = ("expert_mlp",)
    replicable: ClassVar[tuple[str, ...]] = ("kv_heads", "global_kv_heads")

    preset: str = "tiny"
    layers: int = 4
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 0
    global_head_dim: int = 0
    global_kv_heads: int = 0
    kv_shared_layers: int = 0
    kv_shared_mlp: int = 0
    per_layer_width: int = 0
    per_layer_media: int = -1
    kv_rank: int = 0
    q_rank: int = 0
    nope_head_dim: int = 0
    rope_head_dim: int = 0
    v_head_dim: int = 0
    mlp: int = 192
    vocab: int = 0
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False
    v_norm: bool = False
    keys_as_values: bool = False
    norm_plus_one: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    layer_scalar: bool = False
    activation: str = "silu"
    scaled_embed: bool = False
    score_width: float = 0.0
    score_cap: float = 0.0
    logit_cap: float = 0.0
    attention_gate: bool = False
    delta_heads: int = 0
    delta_value_heads: int = 0
    delta_key_dim: int = 128
    delta_value_dim: int = 128
    delta_taps: int = 4
    attention_every: int = 4
    mask: str = field(default="causal", metadata={"example": "text sees all before; vision sees vision in item"})
    window: int = 0
    chunk: int = 0
    full_layers: int = 0
    full_every: int = 0
    full_causal: bool = False
    rope_theta: float = 10000.0
    local_rope_theta: float = 0.0
    nope_every: int = 0
    rope_share: float = 1.0
    rope_scaling: str = "none"
    rope_factor: float = 1.0
    rope_context: int = 0
    rope_turns: tuple[float, ...] = field(default=(), metadata={"example": (1.0, 4.0)})
    rope_mscale: float = 1.0
    rope_mscale_all: float = 0.0
    rope_sections: tuple[int, ...] = field(default=(), metadata={"example": (16, 24, 24)})
    rope_interleaved: bool = False
    norm_eps: float = 1e-5
    tied: bool = False
    experts: int = 0
    experts_per_token: int = 2
    expert_mlp: int = 0
    shared_experts: int = 0
    shared_gate: bool = False
    dense_layers: int = 0
    mlp_beside_experts: bool = False
    router_norm: bool = False
    expert_scale: bool = False
    expert_capacity: float = 0.0
    expert_buffer: float = 0.0
    router: str = "softmax"
    router_normalised: bool = True
    router_scale: float = 1.0
    router_groups: int = 1
    router_group_limit: int = 1
    router_bias: bool = False
    router_bias_rate: float = 0.001
    balance_loss: float = 0.0
    router_z_loss: float = 0.0
    z_loss: float = 0.0
    attention: str = "auto"
    remat: str = "auto"

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "kv_heads", "mlp", "rope_theta", "norm_eps", "attention_every"):
            positive(f"Decoder.{name}", getattr(self, name))
        for name in _NOT_NEGATIVE:
            not_negative(f"Decoder.{name}", getattr(self, name))
        fix = "must be the number of a token, or -1 for none"
        require(self.per_layer_media >= -1, "Decoder.per_layer_media", self.per_layer_media, fix)
        divides("Decoder.kv_heads", self.kv_heads, self.heads, "Decoder.heads")
        if self.kv_rank:
            self._check_latent()
        elif not self.head_dim:
            divides("Decoder.heads", self.heads, self.width, "Decoder.width")
        fix = f"must be above 0, at most 1, and rotate an even number of a head's {self.head_width} components"
        is_part = 0 < self.rope_share < 1 and self.rotary_width > 0 and self.rotary_width % 2 == 0
        require(is_part or self.rope_share == 1, "Decoder.rope_share", self.rope_share, fix)
        even, name = "must be even, such as 16", "rope_head_dim" if self.kv_rank else "head_dim"
        require(self.rotary_width % 2 == 0, f"Decoder.{name}", self.rotary_width, even)
        kind = Rules.parse(self.mask, "Decoder.mask").kind
        sizes = {"value_width": self.value_width, "soft_cap": self.score_cap}
        check_backend("Decoder", self.attention, self.head_width, self.chunk, kind, **sizes)
        if self.global_head_dim or self.global_kv_heads:
            self._check_global()
            width = self.global_head_dim or self.head_width
            check_backend("Decoder", self.attention, width, 0, kind, soft_cap=self.score_cap)
        one_of("Decoder.remat", self.remat, REMATS)
        require(self.pre_norms or self.post_norms, "Decoder.pre_norms", value=False, fix="set Decoder.post_norms too")
        one_of("Decoder.activation", self.activation, ACTIVATIONS)
        self._check_window()
        self._check_rope(self.rotary_width // 2)
        if self.experts:
            self._check_experts()
        if self.delta_heads:
            self.delta.check("Decoder")
            fix = "delta layers see earlier tokens of a sample alone; use 'causal', or set Decoder.delta_heads to 0"
            require(self.mask == "causal", "Decoder.mask", self.mask, fix)

    def check(self, name: str, layout: Layout) -> None:
        """See `ModuleSettings`; the delta rule goes over a row's tokens in their order."""
        super().check(name, layout)
        fix = f"delta layers ({setting_name(name, self, 'delta_heads')}) go from token to token; set it to 'contiguous'"
        is_in_order = layout.cp == 1 or layout.cp_tokens == "contiguous"
        require(is_in_order or not self.needs_order, f"{name}/Layout.cp_tokens", layout.cp_tokens, fix)
        field, width = setting_name(name, self, "per_layer_width"), self.per_layer_width
        fix = f"each layer reads the embeddings ({field}={width}), which are in the first stage alone; use one stage"
        require(layout.stages == 1 or not width, f"{name}/Layout.pp", layout.pp, fix)
        if self.kv_shared_layers:
            self._check_sharing(setting_name(name, self, "kv_shared_layers"), f"{name}/Layout.layers", layout)

    def check_media(self, name: str, media: Sequence[str]) -> None:
        """Raises `ConfigError` if `mask` names other media than those of the modules `media`."""
        field = setting_name(name, self, "mask")
        Rules.parse(self.mask, field).require_kinds(media, field, self.mask)

    def check_codes(self, name: str, *, example: str) -> None:
        """Raises `ConfigError` unless it has a number of codes, one position a code, and sees all codes before.

        ``example`` is a number of codes for the message, and whose it is.
        """
        fix = f"no tokenizer decides how many codes {name!r} speaks; set it, such as to {example}"
        require(self.vocab > FIRST_CODE, setting_name(name, self, "vocab"), self.vocab, fix)
        fix = "codes have no rows and columns; set it to ()"
        require(not self.rope_sections, setting_name(name, self, "rope_sections"), self.rope_sections, fix)
        fix = "codes are of no kind, and see those before; set it to 'causal'"
        require(self.mask == "causal", setting_name(name, self, "mask"), self.mask, fix)

    def idle(self) -> dict[str, str]:
        """The fields without effect, given the other fields, each with the reason: such as "rope_context"; or {}."""
        reasons: dict[str, str] = {}
        if self.rope_scaling not in ROPE_TURNS:
            reason = f"Decoder.rope_scaling={self.rope_scaling!r} does not read it"
            reasons |= dict.fromkeys(("rope_context", "rope_turns"), reason)
        if not self.rope_sections:
            reasons["rope_interleaved"] = "Decoder.rope_sections=(): there is one number for all pairs"
        if not self.qk_norm:
            reasons["qk_norm_whole"] = "Decoder.qk_norm=False: queries and keys have no norm"
        if not (self.window or self.chunk):
            names = ("local_rope_theta", "global_head_dim", "global_kv_heads", "full_causal")
            reasons |= dict.fromkeys(names, "Decoder.window=0: no layer has a window or chunks")
        elif self.mask == "causal":
            reasons["full_causal"] = "Decoder.mask='causal' shows no later tokens"
        if not self.per_layer_width:
            reasons["per_layer_media"] = "Decoder.per_layer_width=0: there are no such tables"
        if not self.kv_rank:
            reasons |= dict.fromkeys(LATENT_SETTINGS, "Decoder.kv_rank=0: there is no latent attention")
        elif self.rope_scaling != "yarn":
            reason = f"Decoder.rope_scaling={self.rope_scaling!r} does not read it"
            reasons |= dict.fromkeys(("rope_mscale", "rope_mscale_all"), reason)
        if not self.delta_heads:
            reasons |= dict.fromkeys(DELTA_SETTINGS, "Decoder.delta_heads=0: there are no delta layers")
        if not self.kv_shared_layers:
            reasons["kv_shared_mlp"] = "Decoder.kv_shared_layers=0: all layers have keys and values of their own"
        if not self.experts:
            reasons |= dict.fromkeys(EXPERT_SETTINGS, "Decoder.experts=0: there are no experts")
        elif not self.router_bias:
            reasons["router_bias_rate"] = "Decoder.router_bias=False: there is no bias"
        return reasons

    @property
    def turns(self) -> tuple[float, ...]:
        """``rope_turns``, or the defaults of the scaling. Only for the scalings ``llama3`` and ``yarn``."""
        return self.rope_turns or ROPE_TURNS[self.rope_scaling]

    @property
    def axis_of_pair(self) -> tuple[int, ...]:
        """The axis of a position, time, row or column, that rotates each pair of a head; () for positions of one
        number.
        """
        sections = self.rope_sections
        if not self.rope_interleaved:
            return tuple(axis for axis, pairs in enumerate(sections) for _ in range(pairs))
        cycles = ((pair // 3, pair % 3) for pair in range(sum(sections)))
        return tuple(axis if cycle < sections[axis] else 0 for cycle, axis in cycles)

    def of_run(self, run: LayerRun) -> DecoderConfig:
        """The settings by which the layers of a run compute."""
        changes = self._shape_of(run) | self._rope_of(run)
        return replace(self, **changes) if changes else self

    def shaped(self, run: LayerRun) -> DecoderConfig:
        """The settings by which the parameters of a run's layers are made."""
        changes = self._shape_of(run)
        return replace(self, **changes) if changes else self

    @property
    def delta(self) -> DeltaSizes:
        """Sizes of the delta layers."""
        return DeltaSizes(
            layers=self.layers,
            width=self.width,
            heads=self.delta_heads,
            value_heads=self.delta_value_heads or self.delta_heads,
            key_dim=self.delta_key_dim,
            value_dim=self.delta_value_dim,
            taps=self.delta_taps,
            eps=self.norm_eps,
        )

    @property
    def expert_width(self) -> int:
        """Hidden units of one expert."""
        return self.expert_mlp or self.mlp

    @property
    def shared_width(self) -> int:
        """Hidden units of all shared experts."""
        return self.shared_experts * self.expert_width

    @property
    def reads_keys(self) -> bool:
        """Whether layers with these settings, those of a run, read the keys and values of another layer."""
        return self.kv_shared_layers >= self.layers

    @property
    def has_values(self) -> bool:
        """Whether layers with these settings, those of a run, have a product for values."""
        return not (self.keys_as_values or self.reads_keys)

    @property
    def needs_order(self) -> bool:
        """Whether there are delta layers, whose states go from token to token."""
        return self.delta_heads > 0

    @property
    def uncut_setting(self) -> str:
        """``per_layer_width`` or ``kv_shared_layers``, if it is set; see `ModuleSettings`."""
        names = ("per_layer_width", "kv_shared_layers")
        return next((name for name in names if getattr(self, name)), "")

    @property
    def grid_setting(self) -> str:
        """`rope_sections` if they are set; see `ModuleSettings`."""
        return "rope_sections" if self.rope_sections else ""

    @property
    def head_width(self) -> int:
        """Width of one head's queries and keys."""
        if self.kv_rank:
            return self.nope_head_dim + self.rope_head_dim
        return self.head_dim or self.width // self.heads

    @property
    def rotary_width(self) -> int:
        """Width of the part of one head that has frequencies."""
        if self.kv_rank:
            return self.rope_head_dim
        return self.head_width if self.rope_scaling == PROPORTIONAL else int(self.rope_share * self.head_width)

    @property
    def rotated_pairs(self) -> int:
        """The number of pairs of components whose frequency is not 0, of a head of layers without the window."""
        width = self.global_head_dim or self.rotary_width
        return int(self.rope_share * width / 2) if self.rope_scaling == PROPORTIONAL else width // 2

    @property
    def value_width(self) -> int:
        """Width of one head's values."""
        return (self.v_head_dim or self.nope_head_dim) if self.kv_rank else self.head_width
