"""What an ONNX file says of itself, read from its bytes: right where it is one, nothing where it is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.graph_metadata import read_metadata

onnx = pytest.importorskip("onnx", reason="writing graphs needs the extra 'export'")
METADATA = {"specrt.context_length": "4096", "": "é", "empty": "", "long": "x" * 300}


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """A graph with weights of a megabyte in it, which hold all bytes there are, and metadata behind them."""
    values = onnx.helper.make_tensor("weights", onnx.TensorProto.UINT8, [1 << 20], bytes(range(256)) * 4096, raw=True)
    model = onnx.helper.make_model(onnx.helper.make_graph([], "graph", [], [], [values]), producer_name="tests")
    onnx.helper.set_model_props(model, METADATA)
    onnx.save(model, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def test_metadata_is_what_was_written(graph: Path) -> None:
    assert read_metadata(graph) == METADATA


def test_a_graph_may_have_none(graph: Path) -> None:
    model = onnx.load(graph)
    del model.metadata_props[:]
    onnx.save(model, graph)
    assert read_metadata(graph) == {}


@pytest.mark.parametrize(
    "contents",
    [b"", b"graph of the target", b"\xff" * 40, b"\x72\xff\xff\xff\xff\x0f\x0a", b"\x72", b"\x0a\x85", bytes(range(256))],
)
def test_a_file_that_is_no_graph_has_none(tmp_path: Path, contents: bytes) -> None:
    (tmp_path / "model.onnx").write_bytes(contents)
    assert read_metadata(tmp_path / "model.onnx") == {}


def test_a_graph_that_was_cut_short_ends_there(graph: Path) -> None:
    whole = graph.read_bytes()
    for left in (len(whole) - 1, len(whole) - 200, len(whole) // 2, 3):
        graph.write_bytes(whole[:left])
        assert set(read_metadata(graph)) < set(METADATA)
