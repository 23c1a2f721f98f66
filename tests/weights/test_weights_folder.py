"""Folders of safetensors: what is wrong with one, and its tensors on devices, shard by shard."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from mmjax.configurable import ConfigError
from mmjax.weights.folder import CONFIG, INDEX, SINGLE, WeightsFolder
from mmjax.weights.parameters import FolderParameters, find_copies, find_leaves
from mmjax.weights.table import SAME, TRANSPOSED, TRANSPOSED_LIST, Row, View, expand, match
from mmjax.weights.write import rewrite
from mmjax.weights.write import write as write_new

LAYERS = 3
ROWS = (
    Row("embed", ("model.embed.weight",)),
    Row("layers/{}/q", ("model.layers.{}.q.weight",), TRANSPOSED),
    Row("patches", ("conv.weight",), View((2, 3, 1, 0), (8, 3, 2, 2))),
)
SHAPES = {"embed": (7, 8), "patches": (12, 8)} | {f"layers/{i:03d}/q": (8, 4) for i in range(LAYERS)}


def tensors(dtype: type = np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"model.embed.weight": (7, 8), "conv.weight": (8, 3, 2, 2)}
    shapes |= {f"model.layers.{i}.q.weight": (4, 8) for i in range(LAYERS)}
    return {key: rng.normal(size=shape).astype(dtype) for key, shape in shapes.items()}


def write(folder: Path, dtype: type = np.float32, shards: int = 1) -> Path:
    """A folder like those of save_pretrained, in one file or in several with an index."""
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text('{"model_type": "toy"}')
    own = tensors(dtype)
    if shards == 1:
        save_file(own, folder / SINGLE)
        return folder
    places = {key: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, key in enumerate(own)}
    for file in set(places.values()):
        save_file({key: own[key] for key, place in places.items() if place == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def parameters(path: Path) -> FolderParameters:
    folder = WeightsFolder.open(str(path))
    return FolderParameters(folder=folder, places=find_leaves(folder, "toy", expand(ROWS, LAYERS), SHAPES))


def ours(own: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The leaves, written without the table."""
    leaves = {
        "embed": own["model.embed.weight"],
        "patches": np.moveaxis(own["conv.weight"], (2, 3, 1, 0), (0, 1, 2, 3)),
    }
    leaves["patches"] = leaves["patches"].reshape(12, 8)
    return leaves | {f"layers/{i:03d}/q": own[f"model.layers.{i}.q.weight"].T for i in range(LAYERS)}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=["f32", "f16", "bf16"])
@pytest.mark.parametrize("shards", [1, 2], ids=["one_file", "shards"])
def test_leaves_on_devices(tmp_path: Path, dtype: type, shards: int) -> None:
    """Split, split over two axes, joined dimensions split, and replicated; every shard is the slice of the whole."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), devices=jax.devices()[:8])
    specs = {"embed": PartitionSpec(None, "b"), "patches": PartitionSpec("b", "a")}
    found = parameters(write(tmp_path / "folder", dtype, shards))
    targets = {
        f"toy/{leaf}": jax.ShapeDtypeStruct(
            shape, np.float32, sharding=NamedSharding(mesh, specs.get(leaf, PartitionSpec("a")))
        )
        for leaf, shape in SHAPES.items()
    }
    told: list[tuple[int, int]] = []
    read = found.read(targets, lambda done, total: told.append((done, total)))
    wanted = ours(tensors(dtype))
    for leaf, want in wanted.items():
        got = read[f"toy/{leaf}"]
        assert got.dtype == np.float32 and got.sharding == targets[f"toy/{leaf}"].sharding
        np.testing.assert_array_equal(np.asarray(got), want.astype(np.float32))
    size = 4 * sum(leaf.size for leaf in wanted.values())
    assert told[-1] == (size, size) and len(told) == len(wanted)


def test_a_rounded_leaf(tmp_path: Path) -> None:
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.ShapeDtypeStruct((7, 8), ml_dtypes.bfloat16, sharding=place)
    read = parameters(write(tmp_path / "folder")).read({"toy/embed": target})
    want = tensors()["model.embed.weight"].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(read["toy/embed"]), want)


def spoil(change: Callable[[Path], object], shards: int = 1) -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        change(write(folder, shards=shards))
        return folder

    return made


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:100])


def index_of(folder: Path, **places: str) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))


BROKEN: dict[str, tuple[Callable[[Path], Path], str]] = {
    "no folder": (lambda folder: folder / "none", "is no directory"),
    "empty": (lambda folder: (folder.mkdir(), folder)[1], "is empty; download the model again, with access to it"),
    "no config": (spoil(lambda folder: (folder / CONFIG).unlink()), f"has no {CONFIG}"),
    "torn config": (spoil(lambda folder: (folder / CONFIG).write_text("{")), f"{CONFIG} cannot be read"),
    "list": (spoil(lambda folder: (folder / CONFIG).write_text("[]")), "holds no JSON object"),
    "no weights": (spoil(lambda folder: (folder / SINGLE).unlink()), "has neither model.safetensors nor"),
    "pickle": (
        spoil(lambda folder: (folder / SINGLE).rename(folder / "pytorch_model.bin")),
        "has pytorch_model.bin, a pickle, which may run code",
    ),
    "pointer": (
        spoil(lambda folder: (folder / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\n")),
        "is a pointer of Git LFS and holds no weights; run git lfs pull",
    ),
    "torn": (spoil(lambda folder: cut(folder / SINGLE)), "is no safetensors file"),
    "missing file": (
        spoil(lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(), shards=2),
        "lacks 1 of 2 files, such as model-00002-of-00002.safetensors",
    ),
    "outside": (spoil(lambda folder: index_of(folder, a="../other.safetensors"), shards=2), "is no file of the folder"),
    "torn index": (
        spoil(lambda folder: (folder / INDEX).write_text("{}"), shards=2),
        "is no index of safetensors files",
    ),
    "wrong index": (
        spoil(lambda folder: index_of(folder, gone="model-00001-of-00002.safetensors"), shards=2),
        "lacks gone, which",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_folder_that_cannot_be_used_is_named_in_one_line(tmp_path: Path, name: str) -> None:
    make, message = BROKEN[name]
    with pytest.raises(ConfigError) as caught:
        WeightsFolder.open(str(make(tmp_path / "folder")))
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert str(tmp_path / "folder") in str(caught.value)


def test_all_that_does_not_fit_in_one_message(tmp_path: Path) -> None:
    folder, own = write(tmp_path / "folder"), tensors()
    own["model.layers.0.q.bias"] = np.zeros(4, np.float32)
    own["model.embed.weight"] = np.zeros((7, 9), np.float32)
    del own["model.layers.2.q.weight"]
    save_file(own, folder / SINGLE)
    with pytest.raises(ConfigError) as caught:
        parameters(folder)
    for part in (
        "missing model.layers.2.q.weight",
        "unexpected model.layers.0.q.bias",
        "of another shape model.embed.weight is [7, 9], where embed needs [7, 8]",
    ):
        assert part in str(caught.value)


def test_a_table_has_every_leaf_of_the_module(tmp_path: Path) -> None:
    folder = WeightsFolder.open(str(write(tmp_path / "folder")))
    with pytest.raises(ValueError, match="the table of toy and its leaves differ"):
        find_leaves(folder, "toy", expand(ROWS, LAYERS), {**SHAPES, "bias": (3,)})


def test_a_row_of_a_table_that_the_tensor_lacks(tmp_path: Path) -> None:
    folder = WeightsFolder.open(str(write(tmp_path / "folder")))
    entries = expand([Row("last", ("model.embed.weight",), View(theirs=(1, 8), rows=(7, 8)))], 0)
    with pytest.raises(ConfigError, match="of another shape"):
        find_leaves(folder, "toy", entries, {"last": (8,)}, prefixes=["model.embed"])
    assert SAME.shape_of((3,)) == (3,)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_copy_with_other_leaves_reads_what_they_leave(tmp_path: Path, dtype: type) -> None:
    """A table in two leaves, the first three rows of another one, and a matrix that no leaf is a view of."""
    folder = WeightsFolder.open(str(write(tmp_path / "folder", dtype)))
    places = {
        "first": ("model.embed.weight", View(rows=(0, 2))),
        "rest": ("model.embed.weight", View(rows=(2, 7))),
        "upper": ("model.layers.0.q.weight", View(rows=(0, 3))),
        "whole": ("model.layers.1.q.weight", TRANSPOSED),
    }
    rng = np.random.default_rng(1)
    leaves = {"first": (2, 8), "rest": (5, 8), "upper": (3, 8), "whole": (8, 4)}
    values = {name: rng.normal(size=shape).astype(np.float32) for name, shape in leaves.items()}
    read: list[str] = []
    plain = WeightsFolder.tensor
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightsFolder, "tensor", lambda self, key: (read.append(key), plain(self, key))[1])
        rewrite(folder, places, lambda names: {name: values[name] for name in names}, tmp_path / "out")
    assert sorted(read) == ["conv.weight", "model.layers.0.q.weight", "model.layers.2.q.weight"]
    got, want = load_file(tmp_path / "out" / SINGLE), tensors(dtype)
    want["model.embed.weight"] = np.concatenate([values["first"], values["rest"]]).astype(dtype)
    want["model.layers.0.q.weight"][:3] = values["upper"].astype(dtype)
    want["model.layers.1.q.weight"] = values["whole"].T.astype(dtype)
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        assert got[key].dtype == dtype and np.array_equal(got[key], tensor), key


def test_a_single_file_counts_before_an_index_beside_it(tmp_path: Path) -> None:
    """As transformers reads it, where an earlier save in several files has left its index and its files."""
    folder, old = write(tmp_path / "folder"), write(tmp_path / "old", shards=2)
    for file in old.glob("model*"):
        shutil.copy(file, folder)
    for file in folder.glob("model-*"):
        save_file({key: -tensor for key, tensor in load_file(file).items()}, file)
    opened = WeightsFolder.open(str(folder))
    assert {tensor.file for tensor in opened.tensors.values()} == {SINGLE}
    for key, tensor in tensors().items():
        np.testing.assert_array_equal(opened.tensor(key)[:], tensor)
    rewrite(opened, {}, lambda names: {}, tmp_path / "out")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [CONFIG, SINGLE]


TIED = Row("embed", ("model.embed.weight",), copies=("head.weight",))


def tied(folder: Path, head: Callable[[np.ndarray], np.ndarray]) -> WeightsFolder:
    """A folder with tied embeddings that has the table once more, as its head."""
    folder.mkdir()
    (folder / CONFIG).write_text("{}")
    table = tensors()["model.embed.weight"]
    save_file({"model.embed.weight": table, "head.weight": head(table)}, folder / SINGLE)
    return WeightsFolder.open(str(folder))


def test_a_copy_of_a_tensor_follows_its_leaf(tmp_path: Path) -> None:
    folder = tied(tmp_path / "folder", lambda table: table)
    entries = expand([TIED], 0)
    places = find_leaves(folder, "toy", entries, {"embed": (7, 8)})
    copies = find_copies(folder, "toy", entries, places)
    learned = np.full((7, 8), 3, np.float32)
    read = {"toy/embed": learned}
    assert rewrite(folder, places, lambda names: read, tmp_path / "out", copies=copies) == 2
    for tensor in load_file(tmp_path / "out" / SINGLE).values():
        np.testing.assert_array_equal(tensor, learned)
    alone = match(entries, ["head.weight"])
    assert alone.places == {"embed": ("head.weight", SAME)} and not alone.missing and not alone.copies


@pytest.mark.parametrize("head", [lambda table: table + 1, lambda table: table[:-1]], ids=["values", "shape"])
def test_a_copy_with_other_values_is_refused(tmp_path: Path, head: Callable[[np.ndarray], np.ndarray]) -> None:
    folder, entries = tied(tmp_path / "folder", head), expand([TIED], 0)
    places = find_leaves(folder, "toy", entries, {"embed": (7, 8)})
    with pytest.raises(ConfigError, match=r"model\.embed\.weight and head\.weight have other values.*set tie_word_emb"):
        find_copies(folder, "toy", entries, places)


@pytest.mark.parametrize("view", [SAME, TRANSPOSED], ids=["embed", "head"])
def test_a_grown_table_has_the_rows_of_the_folder_and_fresh_ones(tmp_path: Path, view: View) -> None:
    """Split anywhere over devices; fresh rows lie close to the mean, differ, and are the same each time."""
    plain = WeightsFolder.open(str(write(tmp_path / "folder", ml_dtypes.bfloat16)))
    key, table = "model.embed.weight", tensors(ml_dtypes.bfloat16)["model.embed.weight"]
    folder = plain.grown(key, 12)
    assert plain.grown(key, 5) is plain and folder.tensors[key].bytes == 12 * 8 * 2
    whole = folder.tensor(key)[0:12, 0:8]
    assert whole.dtype == table.dtype and whole.shape == (12, 8)
    np.testing.assert_array_equal(whole[:7], table)
    fresh, rows = whole[7:].astype(np.float32), table.astype(np.float32)
    assert np.abs(fresh - rows.mean(0)).max() < 0.1 * rows.std(0).max() and len(np.unique(fresh, axis=0)) == 5
    mesh = jax.make_mesh((4, 2), ("a", "b"), devices=jax.devices()[:8])
    shape = (12, 8) if view is SAME else (8, 12)
    spec = PartitionSpec("a", "b") if view is SAME else PartitionSpec("b", "a")
    target = jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, spec))
    places = find_leaves(folder, "toy", expand([Row("table", (key,), view)], 0), {"table": shape}, prefixes=["model.e"])
    read = FolderParameters(folder=folder, places=places).read({"toy/table": target})["toy/table"]
    want = whole.astype(np.float32)
    np.testing.assert_array_equal(np.asarray(read), want if view is SAME else want.T)


@pytest.mark.parametrize("mask", [0o022, 0o027], ids=oct)
def test_files_of_tensors_have_the_mode_of_other_files(tmp_path: Path, mask: int) -> None:
    folder, before = WeightsFolder.open(str(write(tmp_path / "folder"))), os.umask(mask)
    try:
        rewrite(folder, {}, lambda names: {}, tmp_path / "out")
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "out").iterdir()}
    assert modes == {CONFIG: 0o666 & ~mask, SINGLE: 0o666 & ~mask}


# ---- lists of tensors ------------------------------------------------------------------------------------------------

EXPERTS = "model.layers.0.experts.*.up.weight"


def listed(folder: Path, dtype: type = np.float32, shards: int = 1) -> dict[str, np.ndarray]:
    """A folder with a list of three tensors, in one file or in several."""
    rng, own = np.random.default_rng(0), {"norm": np.ones(4, dtype)}
    for number in range(3):
        for name, shape in (("up", (5, 4)), ("down", (4, 5))):
            own[f"model.layers.0.experts.{number}.{name}.weight"] = rng.normal(size=shape).astype(dtype)
    folder.mkdir()
    (folder / CONFIG).write_text('{"model_type": "toy"}')
    places = {key: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, key in enumerate(own)}
    for file in set(places.values()):
        save_file({key: own[key] for key, place in places.items() if place == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    return own


@pytest.mark.parametrize("shards", [1, 3])
def test_a_list_of_tensors_is_one_leaf(tmp_path: Path, shards: int) -> None:
    """Each device reads its part of its experts alone; and the folder is written bit for bit, each leaf read once."""
    own = listed(tmp_path / "folder", ml_dtypes.bfloat16, shards)
    folder = WeightsFolder.open(str(tmp_path / "folder"))
    rows = [Row(f"layers/{{}}/{name}", (EXPERTS.replace("up", name),), TRANSPOSED_LIST) for name in ("up", "down")]
    entries = expand([Row("norm", ("norm",)), *rows], 1)
    shapes = {"norm": (4,), "layers/000/up": (3, 4, 5), "layers/000/down": (3, 5, 4)}
    places = find_leaves(folder, "toy", entries, shapes)
    parameters = FolderParameters(folder=folder, places=places)
    assert parameters.dtypes["toy/layers/000/up"] == "bfloat16" and "of bfloat16" in parameters.describe()
    mesh = jax.make_mesh((3, 2), ("experts", "columns"), devices=jax.devices()[:6])
    sharding = NamedSharding(mesh, PartitionSpec("experts", "columns"))
    target = jax.ShapeDtypeStruct((3, 4, 5), np.float32, sharding=sharding)
    leaf = parameters.read({"toy/layers/000/up": target})["toy/layers/000/up"]
    assert {shard.data.shape for shard in leaf.addressable_shards} == {(1, 2, 5)}
    stack = np.stack([own[EXPERTS.replace("*", str(number))].T for number in range(3)])
    np.testing.assert_array_equal(leaf, stack.astype(np.float32))

    values = {leaf: np.asarray(view.read(folder.tensor(key), shapes[leaf[4:]], (slice(None),) * len(shapes[leaf[4:]])))
              for leaf, (key, view) in places.items()}  # fmt: skip
    reads: list[str] = []

    def read(names: Collection[str]) -> dict[str, np.ndarray]:
        reads.extend(names)
        return {name: values[name] for name in names}

    assert rewrite(folder, places, read, tmp_path / "out") == 7
    again = WeightsFolder.open(str(tmp_path / "out"))
    for key, tensor in own.items():
        np.testing.assert_array_equal(np.asarray(again.tensor(key)[(slice(None),) * tensor.ndim]), tensor)
    assert shards > 1 or sorted(reads) == sorted(places)
    small = {leaf.removeprefix("toy/"): value for leaf, value in values.items()}
    assert write_new({}, entries, lambda names: {n: small[n] for n in names}, tmp_path / "new", dtype="bfloat16") == 7
    for key, tensor in load_file(tmp_path / "new" / SINGLE).items():
        np.testing.assert_array_equal(tensor, own[key])


def test_a_list_that_lacks_a_tensor_or_has_others_is_refused(tmp_path: Path) -> None:
    own = listed(tmp_path / "folder")
    file = tmp_path / "folder" / "model-00001-of-00001.safetensors"
    entries = expand([Row("norm", ("norm",)), Row("up", (EXPERTS,), TRANSPOSED_LIST)], 1)
    entries += expand([Row("down", (EXPERTS.replace("up", "down"),), TRANSPOSED_LIST)], 1)
    shapes = {"norm": (4,), "up": (3, 4, 5), "down": (3, 5, 4)}
    numbers = {number: EXPERTS.replace("*", str(number)) for number in range(4)}
    wrong = {
        "missing model.layers.0.experts.*.up.weight": [0],
        "unexpected model.layers.0.experts.2.up.weight": [1],
        r"experts.*.up.weight is [2, 5, 4], where up needs [3, 5, 4]": [2],
    }
    for message, without in wrong.items():
        left = {key: tensor for key, tensor in own.items() if key not in [numbers[number] for number in without]}
        save_file(left, file)
        (tmp_path / "folder" / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(left, file.name)}))
        with pytest.raises(ConfigError) as error:
            find_leaves(WeightsFolder.open(str(tmp_path / "folder")), "toy", entries, shapes)
        assert message in str(error.value) and "\n" not in str(error.value)
    save_file({**own, numbers[1]: np.ones((4, 4), np.float32)}, file)
    (tmp_path / "folder" / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(own, file.name)}))
    with pytest.raises(ConfigError, match=r"experts.1.up.weight is float32 \[4, 4\], and number 0 is float32 \[5, 4\]"):
        find_leaves(WeightsFolder.open(str(tmp_path / "folder")), "toy", entries, shapes)
