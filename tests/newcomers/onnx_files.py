"""What an ONNX file of ours may hold."""

from __future__ import annotations

from pathlib import Path


def assert_plain(file: Path, schema: bool = False) -> None:
    """Operators and numbers: nothing that the exporter notes about the program, its files or this machine.

    schema: with the metadata of a personal model, which tell how rows are read.
    """
    import onnx

    graph = onnx.load(file)
    assert graph.graph.node and graph.producer_name == "unalike" and not graph.producer_version
    assert bool(graph.metadata_props) == schema and not graph.graph.metadata_props and not graph.graph.value_info
    for part in (*graph.graph.initializer, *graph.graph.node):
        assert not part.metadata_props and not part.doc_string
        for tensor in [part] if isinstance(part, onnx.TensorProto) else [one.t for one in part.attribute]:
            tensor.ClearField("raw_data")  # numbers may look like anything
    words = graph.SerializeToString()
    for trace in (".py", "unalike/", "site-packages", "Traceback", "/home", str(Path.cwd()), str(file.parent)):
        assert trace.encode() not in words, (file.name, trace)
