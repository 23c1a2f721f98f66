"""From a `SourceConfig` to its reader."""

from __future__ import annotations

import importlib
from pathlib import Path

from mmjax.configurable import ConfigError
from mmjax.data.sources import storage
from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.record import Reader, Unusable


def make_reader(name: str, config: SourceConfig, cache: Path) -> Reader:
    """The reader of source `name`. Raises ConfigError: no such file, or no such factory."""
    reader = _own(name, config) if ":" in config.kind else _built_in(name, config, cache)
    field, files = f"{name}/Source.path", reader.files()
    if not files and ":" not in config.kind:
        raise ConfigError(f"{field}={config.path!r}: no file is called so; name one, or a pattern that fits some")
    for path in files:
        try:
            storage.stamp(path)
        except Unusable as error:
            raise ConfigError(f"{field}={config.path!r}: {error}; name the file or files of the data") from None
    return reader


def _built_in(name: str, config: SourceConfig, cache: Path) -> Reader:
    # Imported when wanted: each brings a library of its own.
    if not config.path:
        example = {"llava": "data.json", "webdataset": "shards/{000..012}.tar"}.get(config.kind, f"data.{config.kind}")
        raise ConfigError(f"{name}/Source.path='': name the file or files of the data, such as {example!r}")
    if config.kind == "llava":
        from mmjax.data.sources.llava import LlavaReader

        return LlavaReader(config)
    if config.kind == "webdataset":
        from mmjax.data.sources.tar import WebDatasetReader

        return WebDatasetReader(config)
    if config.kind == "array_record":
        from mmjax.data.sources.array_record import ArrayRecordReader

        return ArrayRecordReader(config, cache)
    from mmjax.data.sources.parquet import ParquetReader

    return ParquetReader(config)


def _own(name: str, config: SourceConfig) -> Reader:
    field = f"{name}/Source.kind={config.kind!r}"
    module_name, _, factory_name = config.kind.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        fix = "give 'package.module:Factory' of a module that Python finds (PYTHONPATH)"
        raise ConfigError(f"{field}: {' '.join(str(error).split())}; {fix}") from None
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        raise ConfigError(f"{field}: {module_name} has no function or class {factory_name!r}; name one that makes it")
    reader = factory(config)
    missing = [method for method in ("files", "scan", "read") if not callable(getattr(reader, method, None))]
    if missing:
        raise ConfigError(f"{field}: what it makes has no {missing[0]}(); see mmjax.data.sources.Reader")
    return reader  # type: ignore[return-value]
