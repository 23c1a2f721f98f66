"""Answers to messages, by a run's model or one from a folder of weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax

from mmjax.assembly.assembly import place
from mmjax.assembly.latents import Drawings
from mmjax.assembly.parts import PlacedRun
from mmjax.configurable import ConfigError
from mmjax.data.sample import answer_text
from mmjax.data.types import Sample
from mmjax.eval.evaluator import Evaluator, load_parameters
from mmjax.generate.messages import Prompts
from mmjax.pipeline.answers import Answer
from mmjax.pipeline.compile import compile_all
from mmjax.pipeline.config import Sampling
from mmjax.pipeline.stage_state import State
from mmjax.progress import Progress
from mmjax.train.starts import find_starts

OnToken = Callable[[Sequence[str], Sequence[bool]], None]
"""Called after each token with the text so far of every answer, and whether each is complete."""


class Writer:
    """A model on its devices, ready to answer."""

    def __init__(self, prompts: Prompts, run_dir: str | Path = "", style: str = "auto", *, text: bool = True):
        """Places the model, reads its parameters and compiles its programs; all processes call it.

        Args:
          prompts: the messages, and the model's configuration.
          run_dir: the directory of the run whose newest parameters are read; "" takes those that the configuration
            names.
          style: of the progress display; see `Progress`.
          text: whether programs that write text are compiled.

        Raises:
          ConfigError: the devices here are too few, or parameters are missing.
          CheckpointError: the checkpoint is of another model.
        """
        starts = None if run_dir else find_starts(prompts.recipe)
        if starts and starts.fresh:
            raise ConfigError(f"{', '.join(starts.fresh)}: no parameters are given; name a whole model's folder")
        self.parts = place(prompts.recipe, source=prompts.source, trained=False)
        self._evaluator, self._limit = Evaluator(self.parts, room=prompts.room), prompts.limit
        if starts:
            with Progress(1, "reading parameters", style=style) as bar:
                self._states = _states(self.parts, starts.read(self.parts.placed, bar.message))
                bar.update(1)
        else:
            _, self._states = load_parameters(self.parts, run_dir)
        self._style = style
        programs = self._evaluator.predictor.programs(text=text)
        count = len({id(program) for program in programs})
        with Progress(count, "compiling programs", log_every=count, style=style) as bar:
            compile_all(programs, lambda done, _, __: bar.update(done))

    def write(
        self, samples: Sequence[Sample], sampling: Sampling, on_token: OnToken | None = None
    ) -> list[tuple[str, Answer]]:
        """The answer to each sample's last question, as text and as tokens, in the order of samples.

        Args:
          samples: those of the prompts, see ``Prompts.samples``.
          sampling: how tokens are chosen.
          on_token: see ``OnToken``.
        """
        texts, complete = [""] * len(samples), [False] * len(samples)

        def update(first: int, replies: Sequence[Answer]) -> None:
            for number, reply in enumerate(replies, first):
                if not complete[number]:
                    texts[number], complete[number] = self._text(samples[number], reply), reply.ended
            if on_token:
                on_token(texts, complete)

        replies = self._evaluator.write(self._states, samples, limit=self._limit, sampling=sampling, on_token=update)
        return [(self._text(sample, reply), reply) for sample, reply in zip(samples, replies, strict=True)]

    def draw(self, samples: Sequence[Sample]) -> list[Drawings]:
        """The pictures that each generator makes for each sample, by its name, in -1…1.

        Args:
          samples: those of the prompts, see ``Prompts.samples``, with noise.
        """
        total = self._evaluator.drawing_steps(samples)
        with Progress(total, "drawing", style=self._style) as bar:
            return self._evaluator.drawings(self._states, samples, report=bar.advance)

    def _text(self, sample: Sample, reply: Answer) -> str:
        return answer_text(self.parts.tokenizer, sample, reply.tokens)


def _states(parts: PlacedRun, leaves: Mapping[str, jax.Array]) -> dict[str, State]:
    """The states of this process's stages with given parameters."""
    return {n: stage.state.parameters_from_logical(leaves) for n, stage in parts.placed.local_stages.items()}
