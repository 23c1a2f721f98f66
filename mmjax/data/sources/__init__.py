"""Datasets of users: finds and reads their records, and makes samples of them.

A `Reader` finds and reads the records of one dataset (`llava`, `webdataset`, `array_record`, `parquet`, or a reader
from a user's code). `PreparedRecords` makes samples of them, with a metadata index. `Mixture` shuffles and mixes
several datasets.
"""

from mmjax.data.sources.config import SourceConfig
from mmjax.data.sources.record import Entry, Media, Reader, Record, Turn, Unusable, parse_record

__all__ = ["Entry", "Media", "Reader", "Record", "SourceConfig", "Turn", "Unusable", "parse_record"]
