"""Answers to dialogues, by a run's model or by one from a folder of weights."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmjax.configurable import ConfigError
from mmjax.data.messages import Dialogue, write_messages
from mmjax.flags import importing
from mmjax.pipeline.config import Sampling
from mmjax.recipe import Recipe


@dataclass(frozen=True)
class Answer:
    """The answer to one prompt.

    Attributes:
      text: its text.
      tokens: its tokens, without the end token.
      logprobs: their log-probabilities under the model, whatever temperature and top_p are.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


def generate(
    recipe: Recipe,
    run_dir: str | Path,
    dialogues: Sequence[Dialogue],
    *,
    media: str = ".",
    limit: int = 64,
    sampling: Sampling = Sampling(),  # noqa: B008
    source: str = "",
    named: str = "--messages",
    on_token: Callable[[Sequence[str], Sequence[bool]], None] | None = None,
    style: str = "auto",
) -> list[Answer]:
    """Answers dialogues; all processes of a run call it.

    The result has an answer for each, in their order, with its `text`, `tokens` and `logprobs`.

    Args:
      recipe: a run's, as `load_run_config(run_dir)` gives it, under any layout, or that of a folder of weights.
      run_dir: the run's directory; "" takes the parameters that the configuration names.
      dialogues: lists of messages, as `parse_messages` reads them from JSON, such as
        [[{"role": "user", "content": "Which digit?"}]].
      media: the folder that names of media start from.
      limit: the most tokens of an answer.
      sampling: how tokens are chosen; by default each is the most likely one.
      source: the name in `Data.sources` whose template and preprocessing the messages get; "" where all have the same.
      named: name of the messages in errors.
      on_token: called after each token with the text so far of every answer, and whether each is complete.
      style: the style of the progress display: "auto", "bar", "lines" or "silent".

    Raises:
      ConfigError: there are no parameters, a message cannot be read, or the devices do not fit.
      CheckpointError: the checkpoint is of another model.
    """
    with importing():
        from mmjax.eval.evaluator import require_checkpoint
        from mmjax.generate.messages import for_messages
        from mmjax.generate.writer import Writer

    if run_dir:
        require_checkpoint(run_dir)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "messages.jsonl"
        write_messages(dialogues, path, media, named)
        try:
            prompts = for_messages(recipe, str(path), media=media, cache=folder, limit=limit, source=source)
            samples = prompts.samples()
            prompts.require_positions(samples)
        except ConfigError as error:
            raise ConfigError(str(error).replace(str(path), named)) from None
        writer = Writer(prompts, run_dir, style)
        replies = writer.write(samples, sampling, on_token)
    return [Answer(text, tuple(reply.tokens), tuple(reply.logprobs)) for text, reply in replies]
