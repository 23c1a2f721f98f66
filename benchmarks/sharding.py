"""Bytes of a device by kind for each `Layout.shard`: from live arrays of a step, and as a dry run counts them.

The LLM and the encoder of the digits in bf16, without pipeline, over eight CPU devices. Live arrays are those of a rank
after a step: parameters and sums exist only within steps, and are counted from the arguments of the programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mmjax.assembly.assembly import assemble
from mmjax.assembly.buckets import build_packer, with_buckets
from mmjax.assembly.packers import one_bucket
from mmjax.assembly.samples import open_source
from mmjax.bench.rows import Row, at_most
from mmjax.config import load_config
from mmjax.config.shipped import CONFIGS
from mmjax.data.loader import tokenizer_of
from mmjax.mesh.layout import SHARDS
from mmjax.pipeline.memory import memory_by_stage
