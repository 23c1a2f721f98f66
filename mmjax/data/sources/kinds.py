"""Makes the reader of a `SourceConfig`."""

from __future__ import annotations

from pathlib import Path

from mmjax.configurable import ConfigError
from mmjax.data.sources import storage
from mmjax.data.sources.config import PROMPTS, SourceConfig
from mmjax.data.sources.record import Reader, Unusable
from mmjax.user_code import import_named, names_code


def make_reader(name: str, config: SourceConfig, cache: Path) -> Reader:
    """The reader of source `name`, which `config.kind` chooses. Raises ConfigError if there is no such file or factory.

    `scan()` of the result gives the name and place of each record, `read(place)` the record, `files()` the files.

    Args:
      name: the name of the source in `Data.sources`, for messages.
      config: its configuration, such as SourceConfig(kind="llava", path="data.json").
      cache: folder for copies of files behind URLs.
    """
    reader = _from_user_code(name, config) if names_code(config.kind) else _built_in(name, config, cache)
    field, files = f"{name}/Source.path", reader.files()
    if not files and not names_code(config.kind):
        raise ConfigError(f"{field}={config.path!r}: no file is called so; name one, or a pattern that fits some")
    for path in files:
        try:
            storage.stamp(path)
        except Unusable as error:
            raise ConfigError(f"{field}={config.path!r}: {error}; name the file or files of the data") from None
    return reader


def _built_in(name: str, config: SourceConfig, cache: Path) -> Reader:
    # Imported when wanted: each imports another library.
    if not config.path:
        examples = {"llava": "data.json", "webdataset": "shards/{000..012}.tar", "pictures": "my_pictures"}
        example = examples.get(config.kind, f"data.{config.kind}")
        raise ConfigError(f"{name}/Source.path='': name the file or files of the data, such as {example!r}")
    if config.kind in ("llava", PROMPTS):
        from mmjax.data.sources.llava import LlavaReader

        return LlavaReader(config)
    if config.kind == "webdataset":
        from mmjax.data.sources.tar import WebDatasetReader

        return WebDatasetReader(config)
    if config.kind == "array_record":
        from mmjax.data.sources.array_record import ArrayRecordReader

        return ArrayRecordReader(config, cache)
    if config.kind == "pictures":
        from mmjax.data.sources.captioned import CaptionedReader

        return CaptionedReader(config)
    from mmjax.data.sources.parquet import ParquetReader

    return ParquetReader(config)


def _from_user_code(name: str, config: SourceConfig) -> Reader:
    field = f"{name}/Source.kind"
    reader = import_named(field, config.kind)(config)
    missing = [method for method in ("files", "scan", "read") if not callable(getattr(reader, method, None))]
    if missing:
        fix = f"what it makes has no {missing[0]}(); see mmjax.data.sources.Reader"
        raise ConfigError(f"{field}={config.kind!r}: {fix}")
    return reader
