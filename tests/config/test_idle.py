"""No setting is ignored without a word: for each there is a configuration in which it does nothing, or there is none.

Where it does nothing it is refused, or `advise` names it; where it does something neither happens.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from trial_runs import REPOSITORY

from mmjax.config import load_config
from mmjax.config.scopes import scopes_of
from mmjax.configurable import ConfigError, gin_name
from mmjax.data.config import DataConfig
from mmjax.fields import fields_of
from mmjax.models.config import ModelConfig
from mmjax.recipe.advice import advise

BASE = REPOSITORY / "configs/digits_vlm.gin"
Bindings = tuple[str, ...]
NESTED: Bindings = ("Train.schedule='nested'", "vision/Layout.rank_offset=0", "vision/Layout.dp=2")
NESTED += ("vision/Layout.lanes=2",)
FROZEN: Bindings = ("vision/Optimizer.frozen=True", "vision_projector/Optimizer.frozen=True")
SOURCE: Bindings = ("Data.sources={'mine': 1.0}", "mine/Source.path='x.json'")
CALLS: Bindings = ("Model.encoders={'vision': 'vit', 'audio': 'whisper'}", "audio/Layout.rank_offset=8")
HEARD: Bindings = (*CALLS, "Digits.calls=(1, 1)", "Digits.hear=1.0")
PAINTED: Bindings = ("Model.generators={'painter': 'dit'}", "painter/Layout.rank_offset=8", "Digits.draw=1.0")
SOUNDING: Bindings = ("Model.generators={'painter': 'sound-dit'}", "painter/Layout.rank_offset=8")
SOUNDING += ("Digits.say=1.0", "Data.speaker='painter'")
STEPPED: Bindings = (*PAINTED, "painter/DiT.process='ddpm'", "painter/DiT.prediction='v'", "painter/DiT.sampler='ddim'")
FOLDER: Bindings = ("Data.task='folder'", "Data.folder='x'")
SERVED: Bindings = ("Data.servers=('grpc+tls://host:8815',)",)
EXPERTS: Bindings = ("llm/Decoder.experts=4",)
LATENT: Bindings = ("llm/Decoder.kv_rank=8", "llm/Decoder.nope_head_dim=8", "llm/Decoder.kv_heads=4")
DELTA: Bindings = ("llm/Decoder.delta_heads=4",)
SCALED: Bindings = ("llm/Decoder.rope_head_dim=8", "llm/Decoder.rope_scaling='yarn'", "llm/Decoder.rope_context=64")
EXCHANGED: Bindings = (*EXPERTS, "llm/Layout.dp=2", "llm/Layout.ep=2", "vision/Layout.rank_offset=8")
ONE: Bindings = ("llm/Layout.pp=1", "llm/Layout.tp=1", "vision/Layout.dp=1", "vision/Layout.rank_offset=0")

IDLE: dict[str, tuple[str, Bindings, Bindings]] = {
    # A setting with a value that is not its default; what makes it idle; and what gives it effect.
    "Train.inner": ("'eager-1f1b'", (), NESTED),
    "Train.window": ("2", (), ("Train.schedule='three-phase'",)),
    "Train.eval_every": ("5", ("Train.eval_samples=0",), ()),
    "Train.predictions": ("5", ("Train.eval_samples=0",), ()),
    "Train.overlap_grad_reduce": ("True", ("Train.unroll=False",), ("Train.unroll=True",)),
    "Train.deterministic": ("True", ("World.platform='cpu'",), ()),
    "World.transport": ("'collective'", ONE, ()),
    "World.route": ("'sliced'", ONE, ()),
    "World.warm_up_seconds": ("5.0", ("World.warm_up='off'",), ()),
    "Data.workers": ("3", SERVED, ()),
    "Data.prefetch": ("3", ("Data.workers=0",), ("Data.workers=1",)),
    "Data.fallback": ("'local'", (), SERVED),
    "Data.patience": ("5.0", (), SERVED),
    "Data.token_file": ("'x'", (), SERVED),
    "Data.tls_ca": ("'x'", (), SERVED),
    "Data.task": ("'folder'", SOURCE, ("Data.folder='x'",)),
    "Data.folder": ("'x'", (), ("Data.task='folder'",)),
    "Data.max_pixels": ("100", (), FOLDER),
    "Data.cache": ("'x'", (), SOURCE),
    "Data.require_same": ("True", (), SOURCE),
    "Data.max_broken": ("0.3", (), SOURCE),
    "Checkpoint.best": ("'loss'", ("Train.eval_samples=0",), ()),
    "Train.patience": ("3", (), ("Checkpoint.best='loss'", "Train.eval_every=5")),
    "Digits.scale": ("(1.0, 1.1)", (*HEARD, "Digits.images=(0, 0)"), ()),
    "Digits.aspect": ("(1.0, 1.1)", (*HEARD, "Digits.images=(0, 0)"), ()),
    "Digits.distortion": ("0.2", (*HEARD, "Digits.images=(0, 0)"), ()),
    "Digits.read": ("0.5", (*HEARD, "Digits.images=(0, 0)"), ()),
    "Digits.count": ("0.5", (*HEARD, "Digits.images=(0, 0)"), ()),
    "Digits.sum": ("0.5", (*HEARD, "Digits.images=(0, 0)"), ()),
    "Digits.both": ("0.5", (), HEARD),
    "Digits.same": ("0.5", (), HEARD),
    "Digits.hear": ("0.5", (), HEARD),
    "Digits.tone": ("(0.1, 0.2)", (), HEARD),
    "Digits.gap": ("(0.1, 0.2)", (), HEARD),
    "Digits.level": ("(0.1, 0.2)", (), HEARD),
    "Digits.noise": ("(0.1, 0.2)", (), HEARD),
    "Digits.draw": ("0.5", (), PAINTED),
    "Digits.say": ("1.0", (*CALLS, "Digits.calls=(1, 1)", "Digits.hear=1.0", "Digits.images=(0, 0)"), SOUNDING),
    "painter/Vocoder.path": ("'x'", PAINTED, SOUNDING),
    "painter/Vocoder.iterations": ("9", (*SOUNDING, "painter/Vocoder.path='x'"), SOUNDING),
    "painter/Latents.path": ("'x'", SOUNDING, PAINTED),
    "painter/Latents.autoencoder": ("'x'", SOUNDING, PAINTED),
    "Digits.drawn_scale": ("2", (), (*PAINTED,)),
    **{
        f"painter/DiT.{name}": (value, PAINTED, (*PAINTED, "painter/DiT.times='logit_normal'"))
        for name, value in {"times_mean": "0.5", "times_std": "0.5"}.items()
    },
    "painter/DiT.shift": ("3.0", (*PAINTED, "painter/DiT.dynamic_shift=True"), PAINTED),
    "painter/DiT.dynamic_shift": ("True", STEPPED, PAINTED),
    **{
        f"painter/DiT.{name}": (value, PAINTED, (*PAINTED, "painter/DiT.dynamic_shift=True"))
        for name, value in {
            **{"base_shift": "0.6", "max_shift": "0.9", "base_patches": "100", "max_patches": "8192"}
        }.items()
    },
    **{
        f"painter/DiT.{name}": (value, PAINTED, STEPPED)
        for name, value in {
            **{"betas": "'linear'", "beta_start": "0.0001", "beta_end": "0.02", "train_steps": "100"},
            **{"zero_snr": "True", "min_snr": "5.0", "spacing": "'trailing'", "steps_offset": "1", "eta": "0.5"},
            **{"end_clean": "False", "clip": "1.0"},
        }.items()
    },
    "painter/DiT.terminal_time": ("0.02", STEPPED, PAINTED),
    "painter/DiT.guidance_rescale": ("0.7", PAINTED, (*PAINTED, "painter/DiT.guidance=5.0")),
    "Checkpoint.copy_frozen": ("False", (), (*FROZEN, "Checkpoint.init_from='x'")),
    "vision/ViT.rope_theta": ("50.0", ("vision/ViT.positions='learned2d'",), ()),
    "vision/ViT.grid": ("16", (), ("vision/ViT.positions='learned2d'",)),
    "vision/ViT.interpolate": ("'bicubic'", (), ("vision/ViT.positions='learned2d'",)),
    "vision/ViT.full_at": ("(0,)", (), ("vision/ViT.window=4",)),
    "audio/Whisper.length": ("100", CALLS, (*CALLS, "audio/Whisper.positions='learned'")),
    "llm/Decoder.full_layers": ("1", (), ("llm/Decoder.window=8",)),
    "llm/Decoder.full_every": ("2", (), ("llm/Decoder.window=8",)),
    "llm/Decoder.per_layer_media": (
        "1",
        (),
        ("llm/Decoder.per_layer_width=8", "llm/Layout.pp=1", "llm/Layout.tp=1", *ONE),
    ),
    "llm/Decoder.full_causal": ("True", (), ("llm/Decoder.window=8", "llm/Decoder.mask='gemma3'")),
    "llm/Decoder.local_rope_theta": ("5.0", (), ("llm/Decoder.window=8",)),
    "llm/Decoder.global_head_dim": ("32", (), ("llm/Decoder.window=8",)),
    "llm/Decoder.kv_shared_mlp": (
        "40",
        (),
        (*("llm/Decoder.kv_shared_layers=1", "llm/Layout.pp=1", "llm/Layout.tp=1"), *ONE),
    ),
    "llm/Decoder.global_kv_heads": ("4", (), ("llm/Decoder.window=8",)),
    "llm/Decoder.window": ("8", ("llm/Decoder.mask='all sees all everywhere'",), ()),
    "llm/Decoder.rope_factor": ("2.0", (), ("llm/Decoder.rope_scaling='linear'",)),
    "llm/Decoder.rope_context": ("64", (), ("llm/Decoder.rope_scaling='yarn'",)),
    "llm/Decoder.rope_interleaved": ("True", (), ("llm/Decoder.rope_sections=(4, 2, 2)",)),
    "llm/Decoder.rope_turns": ("(1.0, 4.0)", (), ("llm/Decoder.rope_scaling='yarn'", "llm/Decoder.rope_context=64")),
    **{
        f"llm/Decoder.{name}": (value, (), EXPERTS)
        for name, value in {
            **{"experts_per_token": "1", "expert_mlp": "32", "shared_experts": "1", "dense_layers": "1"},
            **{"router": "'sigmoid'", "router_normalised": "False", "router_scale": "2.0", "router_groups": "2"},
            **{"router_bias": "True", "balance_loss": "0.1", "router_z_loss": "0.1"},
            **{"mlp_beside_experts": "True", "router_norm": "True", "expert_scale": "True"},
            "expert_capacity": "1.25",
        }.items()
    },
    **{f"llm/Decoder.{name}": ("8", (), (*LATENT, "llm/Decoder.rope_head_dim=8")) for name in ("q_rank", "v_head_dim")},
    **{
        f"llm/Decoder.{name}": (value, (), DELTA)
        for name, value in {
            **{"delta_value_heads": "8", "delta_key_dim": "8", "delta_value_dim": "8", "delta_taps": "3"},
            "attention_every": "2",
        }.items()
    },
    "llm/Decoder.nope_head_dim": ("8", (), (LATENT[0], LATENT[2], "llm/Decoder.rope_head_dim=8")),
    "llm/Decoder.rope_head_dim": ("8", (), LATENT),
    "llm/Decoder.rope_mscale": ("0.7", (*LATENT, SCALED[0]), (*LATENT, *SCALED)),
    "llm/Decoder.rope_mscale_all": ("0.7", (), (*LATENT, *SCALED)),
    "llm/Decoder.shared_gate": ("True", (), (*EXPERTS, "llm/Decoder.shared_experts=1")),
    "llm/Decoder.router_group_limit": ("2", (), (*EXPERTS, "llm/Decoder.router_groups=2")),
    "llm/Decoder.router_bias_rate": ("0.1", EXPERTS, (*EXPERTS, "llm/Decoder.router_bias=True")),
    "llm/Decoder.expert_buffer": ("2.0", EXCHANGED, (*EXCHANGED, "llm/Layout.ep_way='all-to-all'")),
    "vision/Projector.hidden": ("32", ("vision/Projector.kind='linear'",), ()),
    "vision/Projector.activation": ("'silu'", ("vision/Projector.kind='linear'",), ()),
    "vision/Projector.levels": ("(0,)", (), ("vision/Projector.inject=(0,)",)),
    "vision/ViT.k_bias": ("False", ("vision/ViT.qkv_bias=False",), ()),
    "vision/ViT.qkv_bias": ("False", ("vision/ViT.bias=False",), ()),
    "llm/Decoder.qk_norm_whole": ("True", (), ("llm/Decoder.qk_norm=True",)),
    "vision/Projector.most_tiles": ("2", (), ("vision/Projector.newline=True",)),
    "llm/Layout.cp_way": ("'need'", (), ("llm/Layout.cp=2", "vision/Layout.rank_offset=8")),
    "llm/Layout.cp_tokens": ("'zigzag'", (), ("llm/Layout.cp=2", "vision/Layout.rank_offset=8")),
    "vision/Layout.sp": ("False", (), ("vision/Layout.tp=2", "vision/Layout.dp=2")),
    "vision/Layout.overlap": ("True", (), ("vision/Layout.tp=2", "vision/Layout.dp=2")),
    "vision/Layout.layers": ("(2,)", (), ("vision/Layout.layers=(1, 1)", "vision/Layout.pp=2", "vision/Layout.dp=2")),
    "vision/Layout.chunks": ("2", (), ("vision/Layout.pp=2", "vision/ViT.layers=4", "vision/Layout.dp=2")),
    "vision/Layout.lanes": ("2", (), ("Train.schedule='three-phase'", "vision/Layout.dp=2")),
    "vision/Layout.copies": (
        "2",
        (),
        ("vision/Layout.dp=2", "vision/Layout.rank_offset=0", *("Train.schedule='encoders-first'",)),
    ),
    "vision/Layout.microbatches": ("0", (), ("Train.schedule='three-phase'", "vision/Layout.rank_offset=0")),
    "llm/Layout.ep": ("2", ("llm/Layout.dp=2", "vision/Layout.rank_offset=8"), EXCHANGED),
    "llm/Layout.ep_way": ("'all-to-all'", EXPERTS, EXCHANGED),
    "llm/Layout.expert_tp": ("1", (), EXPERTS),
    "vision/Layout.optimizer_instances": ("2", FROZEN, ()),
    "vision/Layout.shard": ("'gradients'", FROZEN, ()),
    "vision/Layout.gather": ("'step'", (), ("vision/Layout.shard='parameters'",)),
    "vision/Offload.optimizer": ("True", FROZEN, ()),
    "vision/Offload.activations": ("True", (*FROZEN, *NESTED), NESTED),
    "vision/Offload.parameters": ("True", (), ("Train.schedule='encoders-first'", "vision/Layout.rank_offset=0")),
    "llm/Callbacks.projected": ("'tests.marks:x'", (), ()),
    "vision/Lora.alpha": ("3.0", (), ("vision/Lora.rank=2", "vision/Optimizer.frozen=True")),
    "vision/Lora.targets": ("('attn/q',)", (), ("vision/Lora.rank=2", "vision/Optimizer.frozen=True")),
    "mine/Source.max_pixels": ("100", (*SOURCE, "mine/Source.resize='fixed'"), SOURCE),
    "mine/Source.max_patches": ("100", (*SOURCE, "mine/Source.resize='fixed'"), SOURCE),
    "mine/Source.min_pixels": ("100", SOURCE, (*SOURCE, "mine/Source.resize='smart'")),
    "mine/Source.size": ("(28, 28)", SOURCE, (*SOURCE, "mine/Source.resize='fixed'")),
    "mine/Source.fit": ("'crop'", SOURCE, (*SOURCE, "mine/Source.resize='fixed'")),
    "mine/Source.edge": (
        "40",
        (*SOURCE, "mine/Source.resize='fixed'"),
        (*SOURCE, "mine/Source.resize='fixed'", "mine/Source.fit='crop'"),
    ),
    "mine/Source.grids": ("((1, 2),)", SOURCE, (*SOURCE, "mine/Source.resize='anyres'")),
    "mine/Source.alone": ("True", SOURCE, (*SOURCE, "mine/Source.resize='anyres'")),
    "mine/Source.max_seconds": ("5.0", SOURCE, (*SOURCE, *CALLS)),
    **{
        f"mine/Source.{name}": (value, SOURCE, (*SOURCE, "mine/Source.video='timestamps'"))
        for name, value in {
            **{"fps": "1.0", "min_frames": "2", "max_frames": "8", "frames": "4", "video_pixels": "(64, 6400)"},
            **{"frame_pixels": "640", "folder_fps": "5.0", "frame_limit": "99"},
        }.items()
    },
    "mine/Source.time_positions": (
        "4.0",
        (*SOURCE, "mine/Source.video='timestamps'"),
        (*SOURCE, "mine/Source.video='positions'", "llm/Decoder.rope_sections=(2, 3, 3)"),
    ),
    **{
        f"mine/Source.{name}": (value, SOURCE, (*SOURCE, *PAINTED[:2]))
        for name, value in {"drawn_size": "(32, 32)", "drawn_pixels": "4096"}.items()
    },
    **{
        f"mine/Source.{name}": (
            value,
            (*SOURCE, *PAINTED[:2]),
            (*SOURCE, "Model.generators={'painter': 'mmdit'}", PAINTED[1], "painter/MMDiT.references=1"),
        )
        for name, value in {"reference_size": "(32, 32)", "reference_pixels": "4096"}.items()
    },
    "mine/Source.video_sound": ("True", SOURCE, (*SOURCE, *CALLS, "mine/Source.video='timestamps'")),
    "mine/Source.pieces": ("{'question': 'Q: {text} '}", (*SOURCE, "mine/Source.template='folder'"), SOURCE),
    "vision/Optimizer.frozen_dtype": ("'bfloat16'", (), ("vision/Optimizer.frozen=True",)),
    "vision/Optimizer.final_learning_rate": (
        "0.1",
        ("vision/Optimizer.schedule='constant'",),
        ("vision/Optimizer.schedule='linear'",),
    ),
    **{
        f"vision/Optimizer.{name}": (value, ("vision/Optimizer.frozen=True",), ())
        for name, value in {
            **{"learning_rate": "0.5", "warmup": "3", "schedule": "'linear'", "weight_decay": "0.3", "b1": "0.3"},
            **{"b2": "0.3", "eps": "0.5", "ema": "0.9", "rates": "{'layers/*': 0.5}", "layer_decay": "0.3"},
        }.items()
    },
}
"""Settings that other settings switch off."""


def of_unet(bindings: Bindings) -> Bindings:
    """The same bindings of a UNet in place of a DiT."""
    named = tuple(binding.replace("DiT", "UNet").replace("'dit'", "'unet'") for binding in bindings)
    return (*named, "painter/UNet.channels=1")


# Of noise and drawing as for all generators, but for the number of timesteps, which sines of a flow's time read too.
IDLE |= {
    key.replace("DiT", "UNet"): (value, of_unet(idle), of_unet(active))
    for key, (value, idle, active) in IDLE.items()
    if key.startswith("painter/DiT.") and key != "painter/DiT.train_steps"
}


def of_sound(bindings: Bindings) -> Bindings:
    """The same bindings of a generator of recordings in place of one of pictures."""
    painted = (binding.replace("DiT", "SoundDiT").replace("'dit'", "'sound-dit'") for binding in bindings)
    return (*(binding for binding in painted if binding != "Digits.draw=1.0"), *SOUNDING[2:])


IDLE |= {
    key.replace("DiT", "SoundDiT"): (value, of_sound(idle), of_sound(active))
    for key, (value, idle, active) in IDLE.items()
    if key.startswith("painter/DiT.")
}

READ = {
    "Train": "steps epochs max_skipped global_batch microbatches schedule lowering seed dtype unroll clip_norm "
    "log_every eval_samples peak_tflops sinks profile_steps debug_nans",
    "World": "devices platform compilation_cache warm_up hang_seconds",
    "Data": "sources sequence_length reorder servers tokenizer new_tokens image_encoder audio_encoder generator "
    "speaker",
    "Digits": "images calls digits turns curriculum",
    "Checkpoint": "every keep init_from grace_seconds",
    "Model": "encoders llm generators edges weights",
    "ViT": "preset layers width heads mlp patch channels merge positions class_token registers frames patch_bias bias "
    "qk_norm v_norm score_width norm stem_norm last_norm norm_eps post_norms clipped output layer_scale gated "
    "activation window attention remat",
    "Whisper": "preset layers width heads mlp mels merge positions pad edges k_bias activation norm_eps attention "
    "remat sample_rate window hop",
    "Decoder": "preset layers width heads kv_heads head_dim kv_rank mlp vocab experts qkv_bias o_bias mlp_bias qk_norm "
    "v_norm kv_shared_layers per_layer_width keys_as_values norm_plus_one pre_norms post_norms layer_scalar activation "
    "scaled_embed score_width score_cap logit_cap attention_gate delta_heads mask chunk nope_every rope_theta "
    "rope_share rope_scaling rope_sections norm_eps tied z_loss attention remat",
    "DiT": "preset layers width heads mlp patch channels merge queries frequencies loss_weight activation attention "
    "remat process prediction times drop_condition sampler steps guidance",
    "SoundDiT": "preset layers width heads mlp patch mels sample_rate window hop edges low high log mean std merge "
    "queries frequencies loss_weight activation attention remat process prediction times drop_condition sampler steps "
    "guidance",
    "MMDiT": "preset layers width heads mlp patch channels queries references rope loss_weight activation attention "
    "remat process prediction times drop_condition sampler steps guidance",
    "UNet": "preset layers width queries channels widths heads_by_level mid_heads blocks transformer_blocks groups "
    "norm_eps flip_sin_to_cos freq_shift linear_projection upcast_attention canvases loss_weight attention remat "
    "process prediction times drop_condition train_steps sampler steps guidance",
    "Projector": "kind norm bias stds pool inject newline",
    "Packing": "buckets",
    "Layout": "dp pp cp tp rank_offset",
    "Offload": "",
    "Edge": "index inject levels",
    "LatentEncoder": "preset layers channels latent_channels widths blocks groups attends moments_convolution causal "
    "shift scale means deviations canvases",
    "Temporal": "preset layers width heads mlp rope_theta activation norm_eps attention remat",
    "Callbacks": "before after",
    "Lora": "rank path",
    "Source": "kind path media held_out strict cut template system question resize mean std resample draft rounded "
    "white video pixel_limit byte_limit draw preset",
    "Optimizer": "frozen",
    "Weights": "init_from path layer new_tokens",
}
"""Settings that every configuration reads where their class has a place."""


def _of_streams(binding: str) -> str:
    """A binding of a generator with one stream as one of a generator with two."""
    return binding.replace("DiT.", "MMDiT.").replace("'dit'", "'mmdit'")


IDLE |= {  # both generators have the settings of noise and drawing
    _of_streams(key): (value, tuple(map(_of_streams, idle)), tuple(map(_of_streams, active)))
    for key, (value, idle, active) in IDLE.items()
    if key.startswith("painter/DiT.")
}


def test_every_setting_is_known_here() -> None:
    """A new one belongs to one of the two tables, and with it comes the question which settings switch it off."""
    every = {f"{gin_name(cls)}.{field}" for cls in scopes_of(ModelConfig(), DataConfig()) for field in fields_of(cls)}
    idle = {key.rpartition("/")[2] for key in IDLE}
    read = {f"{cls}.{field}" for cls, names in READ.items() for field in names.split()}
    assert idle | read == every and not idle & read


def named(key: str, bindings: Bindings) -> str:
    """The refusal of a configuration, or the line of `advise`, that names a setting."""
    try:
        config = load_config([BASE], bindings)
    except ConfigError as error:
        assert str(error).startswith(key.rpartition("/")[2]) or str(error).startswith(key), error
        return str(error)
    return next((line for line in advise(config) if line.startswith(f"{key}=") and "changes nothing: " in line), "")


@pytest.mark.parametrize("key", IDLE)
def test_an_idle_setting_is_refused_or_named(key: str) -> None:
    value, idle, active = IDLE[key]
    assert named(key, (*idle, f"{key}={value}"))
    if key != "llm/Callbacks.projected":  # which no configuration takes
        assert not named(key, (f"{key}={value}", *active))


def test_a_value_that_several_modules_share_is_idle_where_none_reads_it(tmp_path: Path) -> None:
    """A rate for all modules is no mistake where one of them is frozen."""
    assert not named("vision/Optimizer.weight_decay", (*FROZEN, "Optimizer.weight_decay=0.3"))
    lines = advise(load_config([BASE], ["Layout.cp_tokens='zigzag'"]))
    assert [line for line in lines if "cp_tokens" in line] == [
        "vision/Layout.cp_tokens='zigzag' changes nothing: with Layout.cp=1 a rank has whole rows"
    ]
