"""Folders that ``save_pretrained`` writes: ``config.json``, and tensors in one safetensors file or in several."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from mmjax.configurable import ConfigError
from mmjax.json_files import is_there, read_object
from mmjax.weights.grown import GrownTensor
from mmjax.weights.table import Shape, Tensor, TensorList, is_list, keys_of

CONFIG = "config.json"
EXTRACTORS = ("processor_config.json", "preprocessor_config.json")
"""Files with the preprocessing of media, today's first, which has the part for recordings in a dictionary."""
ADAPTER_CONFIG, ADAPTERS = "adapter_config.json", "adapter_model.safetensors"
"""Files of a folder of PEFT, which has only adapters."""
STEM, DIFFUSERS_STEM = "model", "diffusion_pytorch_model"
"""Beginnings of names of files with tensors, in folders of ``transformers`` and of ``diffusers``."""
PIPELINE = "model_index.json"
"""The file of a pipeline of ``diffusers``, whose parts are folders of modules."""
SINGLE = f"{STEM}.safetensors"
INDEX = f"{SINGLE}.index.json"
_POINTER = b"version https://git-lfs"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Numpy's names of dtypes by their names in a file."""
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """A tensor of a folder.

    Attributes:
      file: name of its file in the folder.
      shape: its shape.
      dtype: numpy's name of its dtype, such as "float32", or "bfloat16".
      bytes: its size in bytes.
    """

    file: str
    shape: Shape
    dtype: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class WeightsFolder:
    """A folder whose headers were read.

    Attributes:
      path: the folder as it was named.
      config: its ``config.json``, or ``adapter_config.json`` of a folder of PEFT.
      tensors: its tensors by key, such as "model.layers.0.self_attn.q_proj.weight".
      fresh: numbers of rows that are added to tensors of the folder, by key; see ``grown``.
    """

    path: str
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    fresh: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def open(cls, path: str) -> WeightsFolder:
        """Reads the headers of a folder's files, and no tensor.

        Raises:
          ConfigError: the folder is of another kind, or a file is missing, torn or of another kind; one line that names
            the file and the fix.
        """
        config, tensors = read_config(path), {}
        for file, keys in _files(Path(path)).items():
            infos = _headers(path, file)
            if lacking := sorted(keys - infos.keys()):
                raise ConfigError(
                    f"{Path(path) / file} lacks {lacking[0]}, which its index says is in it; get it again"
                )
            tensors |= infos
        return cls(path=path, config=config, tensors=tensors)

    def info(self, key: str) -> TensorInfo:
        """The file, shape, dtype and size of the tensor of a key; of a list the first one's file, and of its stack.

        Raises:
          KeyError: the folder has no such tensor.
          ConfigError: tensors of a list differ in shape or dtype.
        """
        if not is_list(key):
            return self.tensors[key]
        members = [(name, self.tensors[name]) for name in keys_of(key, self.tensors)]
        if not members:
            raise KeyError(key)
        first = members[0][1]
        for name, info in members:
            if (info.shape, info.dtype) != (first.shape, first.dtype):
                shapes = f"is {info.dtype} {list(info.shape)}, and number 0 is {first.dtype} {list(first.shape)}"
                raise ConfigError(f"{name} {shapes}; tensors of a list must be alike")
        return replace(first, shape=(len(members), *first.shape), bytes=len(members) * first.bytes)

    def tensor(self, key: str) -> Tensor:
        """The tensor of a key. Indexed with a slice for each dimension, it reads that part as a numpy array.

        Raises:
          KeyError: the folder has no such tensor.
        """
        if is_list(key):
            return TensorList([self.tensor(name) for name in keys_of(key, self.tensors)])
        tensor = _opened(str(Path(self.path) / self.tensors[key].file)).get_slice(key)
        if not (rows := self.fresh.get(key, 0)):
            return tensor
        shape = self.tensors[key].shape
        return GrownTensor(tensor, key, (shape[0] - rows, *shape[1:]), rows)

    def grown(self, key: str, rows: int) -> WeightsFolder:
        """The folder with at least `rows` rows in the tensor of `key`; rows behind the folder's are fresh.

        No file changes. It is this object itself if the tensor has that many rows already.
        """
        info = self.tensors[key]
        added = rows - info.shape[0]
        if added <= 0:
            return self
        taller = replace(info, shape=(rows, *info.shape[1:]), bytes=info.bytes // info.shape[0] * rows)
        return replace(self, tensors={**self.tensors, key: taller}, fresh={**self.fresh, key: added})


def read_config(path: str) -> dict[str, Any]:
    """The ``config.json`` of the folder ``path`` as a dict, or its ``adapter_config.json`` if it has only that.

    Raises:
      ConfigError: the folder has neither, or it is no JSON object.
    """
    folder, file = Path(path), Path(path) / CONFIG
    if not folder.is_dir():
        raise ConfigError(f"{path} is no directory; name a folder as save_pretrained writes it")
    if not _names(folder):
        raise ConfigError(f"{path} is empty; download the model again, with access to it if it is gated")
    if not is_there(file) and is_there(folder / ADAPTER_CONFIG):
        return read_object(folder / ADAPTER_CONFIG)
    if not is_there(file) and is_there(folder / PIPELINE):
        fix = "name it in Weights.path of a generator, or one of its folders here"
        raise ConfigError(f"{path} is a pipeline of diffusers; {fix}")
    if not is_there(file):
        raise ConfigError(f"{path} has no {CONFIG}; name a folder as save_pretrained writes it")
    return read_object(file)


def read_extractor(path: str) -> dict[str, Any]:
    """The settings of the folder ``path`` for turning recordings into frames; {} if it has no file of ``EXTRACTORS``.

    They are the part "feature_extractor" of the first such file, or else the whole file.

    Raises:
      ConfigError: its file is no JSON object.
    """
    for file in (Path(path) / name for name in EXTRACTORS):
        if is_there(file):
            settings = read_object(file)
            part = settings.get("feature_extractor")
            return part if isinstance(part, dict) and part else settings
    return {}


def _files(folder: Path) -> dict[str, set[str]]:
    """The files with tensors, each with the keys that the index lists for it.

    A single file has precedence over an index beside it, which an earlier save may have left, as in ``transformers``.
    """
    for stem in (STEM, DIFFUSERS_STEM):
        single = f"{stem}.safetensors"
        if is_there(folder / single):
            return {single: set()}
        if is_there(folder / f"{single}.index.json"):
            return _indexed(folder, f"{single}.index.json")
    if is_there(folder / ADAPTER_CONFIG) and is_there(folder / ADAPTERS):
        return {ADAPTERS: set()}
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickles:
        fix = "load it with transformers and save_pretrained it, which writes safetensors"
        raise ConfigError(f"{folder} has {pickles[0]}, a pickle, which may run code, and no {SINGLE}; {fix}")
    raise ConfigError(f"{folder} has neither {SINGLE} nor {INDEX}; download the model's weights too")


def _names(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read ({error.strerror}); allow it, or name another folder") from None


def _indexed(folder: Path, index: str) -> dict[str, set[str]]:
    places = read_object(folder / index).get("weight_map")
    fix = "get it again"
    if not isinstance(places, dict) or not places:
        raise ConfigError(f"{folder / index} is no index of safetensors files: it has no 'weight_map'; {fix}")
    files: dict[str, set[str]] = {}
    for key, file in places.items():
        if not isinstance(file, str) or not file or Path(file).name != file or "\0" in file:
            raise ConfigError(f"{folder / index} names {str(file)[:80]!r}, which is no file of the folder; {fix}")
        files.setdefault(file, set()).add(key)
    if missing := sorted(file for file in files if not is_there(folder / file)):
        raise ConfigError(f"{folder} lacks {len(missing)} of {len(files)} files, such as {missing[0]}; download them")
    return files


def _headers(path: str, file: str) -> dict[str, TensorInfo]:
    place = Path(path) / file
    try:
        with open(place, "rb") as opened:
            if opened.read(len(_POINTER)) == _POINTER:
                raise ConfigError(f"{place} is a pointer of Git LFS and holds no weights; run git lfs pull in {path}")
        handle = _opened(str(place))
        return {key: _info(file, key, handle.get_slice(key)) for key in handle.keys()}  # noqa: SIM118
    except ConfigError:
        raise
    except Exception as error:  # the library has an error type of its own for a torn file
        raise ConfigError(f"{place} is no safetensors file ({error}); get it again") from None


def _info(file: str, key: str, tensor: Any) -> TensorInfo:
    dtype, shape = tensor.get_dtype(), tuple(tensor.get_shape())
    if dtype not in DTYPES:
        raise ConfigError(f"{file}: {key} is {dtype}, a quantised weight; take the model's folder in BF16, F16 or F32")
    return TensorInfo(file=file, shape=shape, dtype=DTYPES[dtype], bytes=_BYTES[dtype] * prod(shape))


def _opened(place: str) -> Any:
    """A file mapped into memory; it stays open while it is unchanged, since a model's tensors are read one by one."""
    return _mapped(place, Path(place).stat().st_mtime_ns)


@functools.lru_cache(maxsize=256)
def _mapped(place: str, modified: int) -> Any:
    from safetensors import safe_open

    return safe_open(place, framework="numpy")
