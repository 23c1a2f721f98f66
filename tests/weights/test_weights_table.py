"""Tables of weights: views and their inverses, parts of them, names by layer and by folder."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmjax.weights.table import (
    SAME,
    TRANSPOSED,
    Index,
    Row,
    Shape,
    View,
    assemble,
    expand,
    match,
    renamed,
    third,
)

VIEWS: dict[str, tuple[View, Shape, Shape]] = {  # view, the tensor's shape, the leaf's
    "vector": (SAME, (7,), (7,)),
    "matrix": (SAME, (5, 4), (5, 4)),
    "linear": (TRANSPOSED, (5, 4), (4, 5)),
    "second of three": (third(1, 4), (12, 6), (6, 4)),
    "bias of the third": (third(2, 4, SAME), (12,), (4,)),
    "convolution": (View((2, 3, 1, 0), (6, 3, 2, 2)), (6, 3, 2, 2), (12, 6)),
    "convolution with time": (View((2, 3, 4, 1, 0), (6, 3, 2, 2, 2)), (6, 3, 2, 2, 2), (24, 6)),
    "class token": (View(theirs=(1, 1, 8)), (1, 1, 8), (8,)),
    "first of a table": (View(theirs=(1, 8), rows=(0, 1)), (5, 8), (8,)),
    "rest of a table": (View(rows=(1, 5)), (5, 8), (4, 8)),
    "one row": (TRANSPOSED, (5, 1), (1, 5)),
    "last columns of a stack": (View(rows=(4, 7), axis=2), (2, 5, 7), (2, 5, 3)),
    "first rows of each of a stack, transposed": (View((0, 2, 1), rows=(0, 4), axis=1), (2, 7, 5), (2, 5, 4)),
}


def numbered(shape: Shape) -> np.ndarray:
    return np.arange(prod(shape), dtype=np.float32).reshape(shape)


def whole(shape: Shape) -> Index:
    return tuple(slice(None) for _ in shape)


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_undone(name: str) -> None:
    view, theirs, ours = VIEWS[name]
    tensor = numbered(theirs)
    leaf = view.read(tensor, ours, whole(ours))
    assert leaf.shape == ours
    first, last = view.rows or (0, theirs[view.axis])
    np.testing.assert_array_equal(view.undo(leaf), tensor.take(range(first, last), view.axis))


def test_views_are_those_of_torch() -> None:
    """A product with the leaf is torch's linear layer; one with patches flattened by row, column and channel, its
    convolution."""
    tensor = numbered((5, 4))
    x = numbered((2, 4))
    np.testing.assert_array_equal(x @ TRANSPOSED.read(tensor, (4, 5), whole((4, 5))), x @ tensor.T)
    view, theirs, ours = VIEWS["convolution"]
    kernel, image_CHW = numbered(theirs), numbered((3, 2, 2))
    convolved = np.einsum("dchw,chw->d", kernel, image_CHW)
    flat = image_CHW.transpose(1, 2, 0).reshape(-1)
    np.testing.assert_array_equal(flat @ view.read(kernel, ours, whole(ours)), convolved)


class Counted:
    """An array that counts the elements read of it."""

    def __init__(self, array: np.ndarray):
        self.array, self.read = array, 0

    def __getitem__(self, index: Index) -> np.ndarray:
        found = self.array[index]
        self.read += found.size
        return found


@given(data=st.data(), name=st.sampled_from(sorted(VIEWS)))
def test_a_part_is_the_part_of_the_whole(data: st.DataObject, name: str) -> None:
    view, theirs, ours = VIEWS[name]
    index = []
    for size in ours:
        start = data.draw(st.integers(0, size - 1))
        index.append(slice(start, data.draw(st.integers(start + 1, size))))
    tensor = Counted(numbered(theirs))
    part = view.read(tensor, ours, tuple(index))
    np.testing.assert_array_equal(part, view.read(numbered(theirs), ours, whole(ours))[tuple(index)])
    if view.order in {(), (1, 0)} and not view.theirs:  # nothing joined: no element too many is read
        assert tensor.read == part.size


def test_a_leaf_that_is_no_view_of_its_tensor() -> None:
    with pytest.raises(ValueError, match=r"a leaf of \[5, 6\] is no view of dimensions \[2, 2, 3, 6\]"):
        View((2, 3, 1, 0), (6, 3, 2, 2)).read(numbered((6, 3, 2, 2)), (5, 6), whole((5, 6)))


@pytest.mark.parametrize("order", [(), (0, 2, 1)])
def test_leaves_beside_one_another_are_one_tensor(order: tuple[int, ...]) -> None:
    axis = 1 if order else 2
    tensor = numbered((2, 7, 5) if order else (2, 5, 7))
    rows = [Row(name, ("up",), View(order, rows=bounds, axis=axis)) for name, bounds in (("b", (4, 7)), ("a", (0, 4)))]
    entries = expand(rows, 0)
    leaves = {"a": (2, 5, 4), "b": (2, 5, 3)}
    read = {entry.leaf: entry.view.read(tensor, leaves[entry.leaf], whole(tensor.shape)) for entry in entries}
    np.testing.assert_array_equal(assemble(entries, read)["up"], tensor, strict=True)
    with pytest.raises(ValueError, match=r"up: its leaves have the rows \[4\] and leave gaps"):
        assemble(entries[:1], read)


def test_a_leaf_of_named_tensors() -> None:
    """It is their stack, in the order of the names, and is there only with all of them."""
    entries = expand([Row("layers/{}/bounds", ("{}.[least|most].x",))], 2)
    leaf = np.array([-1.5, 2.5], np.float32)
    written = assemble(entries[1:], {"layers/001/bounds": leaf})
    assert {key: tensor.tolist() for key, tensor in written.items()} == {"1.least.x": -1.5, "1.most.x": 2.5}
    assert all(isinstance(tensor, np.ndarray) and tensor.shape == () for tensor in written.values())
    found = match(entries, [*written, "0.least.x"])
    assert found.places == {"layers/001/bounds": ("1.[least|most].x", SAME)}
    assert (found.missing, found.unexpected) == (("0.[least|most].x",), ("0.least.x",))


ROWS = (
    Row("embed", ("model.embed_tokens.weight",)),
    Row("layers/{}/q", ("model.layers.{}.qkv.weight",), third(0, 4)),
    Row("layers/{}/k", ("model.layers.{}.qkv.weight",), third(1, 4)),
    Row("layers/{}/v", ("model.layers.{}.qkv.weight",), third(2, 4)),
    Row("layers/{}/norm", ("model.layers.{}.norm.weight", "model.layers.{}.ln.weight")),
    Row("head", ("lm_head.weight",), TRANSPOSED),
)


def folder(norm: str = "norm", prefix: str = "model.", head: str = "lm_head.") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    tensors = {f"{prefix}embed_tokens.weight": rng.normal(size=(9, 4)), f"{head}weight": rng.normal(size=(9, 4))}
    for i in range(11):
        tensors[f"{prefix}layers.{i}.qkv.weight"] = rng.normal(size=(12, 4))
        tensors[f"{prefix}layers.{i}.{norm}.weight"] = rng.normal(size=(4,))
    return tensors


def shape_of(leaf: str) -> Shape:
    return {"embed": (9, 4), "head": (4, 9), "norm": (4,)}.get(leaf.rpartition("/")[2], (4, 4))


@pytest.mark.parametrize("norm", ["norm", "ln"])
def test_out_of_in_is_the_identity(norm: str) -> None:
    tensors, entries = folder(norm), expand(ROWS, 11)
    found = match(entries, tensors)
    assert not found.missing and not found.unexpected
    leaves = {
        leaf: view.read(tensors[key], shape_of(leaf), whole(shape_of(leaf)))
        for leaf, (key, view) in found.places.items()
    }
    assert len(leaves) == 2 + 4 * 11
    written = assemble(entries, leaves)
    assert written.keys() == folder("norm").keys()
    for key, tensor in written.items():
        np.testing.assert_array_equal(tensor, tensors[key.replace("norm", norm)])


def test_a_row_of_some_layers() -> None:
    entries = expand([Row("layers/{}/a", ("{}.a",), layers=range(1, 3)), Row("layers/{}/b", ("{}.b",))], 3)
    assert [entry.leaf for entry in entries] == [
        f"layers/{leaf}" for leaf in ("001/a", "002/a", "000/b", "001/b", "002/b")
    ]


def test_keys_that_are_missing_or_nobody_expects() -> None:
    tensors = folder()
    del tensors["model.layers.3.qkv.weight"]
    tensors |= {"model.rotary.inv_freq": np.zeros(2), "model.extra": np.zeros(2)}
    found = match(expand(ROWS, 11), tensors, unused=["nothing", r"rotary\..*"])
    assert found.missing == ("model.layers.3.qkv.weight",)
    assert found.unexpected == ("model.extra",)


@pytest.mark.parametrize("prefix, head", [("model.language_model.", "lm_head."), ("llm.model.", "llm.lm_head.")])
def test_a_module_inside_of_a_model(prefix: str, head: str) -> None:
    places = {"model.": ("model.language_model.", "llm.model."), "lm_head.": ("lm_head.", "llm.lm_head.")}
    entries = expand(renamed(ROWS, places), 11)
    found = match(entries, folder(prefix=prefix, head=head))
    assert not found.missing and not found.unexpected
    leaves = {entry.leaf: np.zeros(shape_of(entry.leaf)) for entry in entries}
    assert assemble(entries, leaves).keys() == folder(prefix="model.language_model.").keys()
    with pytest.raises(ValueError, match="begins with none of"):
        renamed(ROWS, {"model.": ("llm.",)})


def test_rows_that_leave_a_gap() -> None:
    entries = expand([ROWS[1], ROWS[3]], 1)
    leaves = {entry.leaf: np.zeros((4, 4)) for entry in entries}
    with pytest.raises(ValueError, match="leave gaps"):
        assemble(entries, leaves)
