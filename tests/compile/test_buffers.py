"""What is read of XLA's text of a program and of its buffers: sizes, arrays and lines of source."""

from __future__ import annotations

from mmjax.compile.buffers import Buffer, by_source, read_buffers
from mmjax.compile.hlo import Module

HLO = """HloModule jit_f, is_scheduled=true

FileNames
1 "/home/user/mmjax/mmjax/models/head.py"
2 "/home/user/mine/encoder.py"

FunctionNames
1 "logits"

FileLocations
1 {file_name_id=1 function_name_id=1 line=40 end_line=40 column=4 end_column=20}
2 {file_name_id=2 function_name_id=1 line=7 end_line=7 column=4 end_column=20}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

%body (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  ROOT %inner.1 = f32[8,8]{1,0} copy(%p), metadata={op_name="x" stack_frame_id=2}
}

ENTRY %main (w: f32[8,8]) -> f32[8,8] {
  %w = f32[8,8]{1,0} parameter(0), metadata={op_name="args[0][\\'llm\\'][\\'head\\']"}
  %dot.1 = (f32[8,8]{1,0}, s8[4096]{0}) custom-call(%w, %w), custom_call_target="__cublas$lt$matmul", \
metadata={op_name="y" stack_frame_id=1}
  %old.1 = f32[8,8]{1,0} copy(%w), metadata={op_name="z" source_file="/x/lib/a.py" source_line=3}
  ROOT %out.1 = f32[8,8]{1,0} copy(%old.1), metadata={op_name="z" stack_frame_id=1}
}
"""
ASSIGNMENT = """BufferAssignment:
allocation 0: size 256, parameter 0, shape |f32[8,8]| at ShapeIndex {}:
 value: <1 w @0> (size=256,offset=0): f32[8,8]{1,0}
allocation 1: size 256, maybe-live-out:
 value: <2 out.1 @0> (size=256,offset=0): f32[8,8]{1,0}
allocation 2: size 4, constant:
 value: <3 c @0> (size=4,offset=0): f32[]
allocation 3: size 4864, preallocated-temp:
 value: <4 dot.1{} @0> (size=16,offset=4848): (f32[8,8]{1,0}, s8[4096]{0})
 value: <5 dot.1{0} @0> (size=256,offset=4096): f32[8,8]{1,0}
 value: <6 dot.1{1} @0> (size=4096,offset=0): s8[4096]{0}
 value: <7 inner.1 (phi) @0> (size=256,offset=4352): f32[8,8]{1,0}
 value: <8 inner.1 @0> (size=256,offset=4352): f32[8,8]{1,0}
 value: <9 old.1 @0> (size=256,offset=256): f32[8,8]{1,0}

Total bytes used: 5380 (5.3KiB)

Used values:
 value: <9 old.1 @0> (size=9999,offset=0): f32[8,8]{1,0}
"""


def test_lines_of_source_are_those_of_frames_or_in_the_instruction() -> None:
    module = Module.of(HLO)
    lines = {name: module.source(module.instructions[name]) for name in ("dot.1", "inner.1", "old.1", "w")}
    assert lines == {"dot.1": "mmjax/models/head.py:40", "inner.1": "mine/encoder.py:7", "old.1": "lib/a.py:3", "w": ""}


def test_buffers_by_kind_and_temporaries_that_are_beside_each_other() -> None:
    """The copy that lies in the workspace's memory is not there at the same time, so it does not count."""
    arguments, results, *temporaries = read_buffers(ASSIGNMENT, Module.of(HLO))
    assert arguments == Buffer(kind="argument", bytes=256, array="f32[8,8]", made_by="args[0]['llm']['head']")
    assert (results.kind, results.made_by, results.source) == ("result", "copy", "mmjax/models/head.py:40")
    assert [(one.bytes, one.made_by) for one in temporaries[:1]] == [(4096, "workspace of cuBLAS")]
    assert [(one.bytes, one.source) for one in temporaries[1:3]] == [
        (256, "mmjax/models/head.py:40"),
        (256, "mine/encoder.py:7"),
    ]
    assert "lib/a.py:3" not in by_source(temporaries)
    assert next(iter(by_source(temporaries).items())) == ("mmjax/models/head.py:40", 4096 + 256 + 16)
    assert str(results) == "f32[8,8] of 0.00 GiB, copy at mmjax/models/head.py:40"


def test_no_text_has_no_buffers() -> None:
    assert read_buffers("", Module.of(HLO)) == ()
