"""The last steps of every lowering: what nobody reads any more goes, and the versions are pinned."""

from collections.abc import Collection

import onnx
import onnx_ir as ir

from export.errors import ExportError
from export.graph_head import LOGITS_ROWS


def remove_unread_nodes(graph: ir.Graph) -> None:
    """Removes nodes of which nothing reads an output."""
    for node in reversed(list(graph)):
        if not any(output.uses() or output.is_graph_output() for output in node.outputs):
            graph.remove(node, safe=True)


def remove_unused(model: ir.Model) -> None:
    """Removes functions, nodes, constants and inputs that nothing reads."""
    graph = model.graph
    for function in list(model.functions):
        del model.functions[function]
    remove_unread_nodes(graph)
    for name in [name for name, value in graph.initializers.items() if not value.uses()]:
        del graph.initializers[name]
    for value in [value for value in graph.inputs if not value.uses()]:
        graph.inputs.remove(value)


def pin_versions(
    model: ir.Model, lowering: str, *, opset: int, ir_version: int, domains: Collection[str] = (), known: Collection[str] = ()
) -> None:
    """Writes the opset and IR version into a graph whose operators all belong to them.

    Args:
        model: The lowered graph; changed in place.
        lowering: The lowering's name, for what is refused.
        opset: Of the default domain.
        ir_version: Of the file.
        domains: Further domains the graph may use, each in version 1.
        known: Operators of the default domain that ONNX's own table does not have and ONNX Runtime does.

    Raises:
        ExportError: An operator is newer than the opset, or of another domain; the sentence names it.
    """
    for node in model.graph:
        if node.domain not in ("", *domains):
            raise ExportError(
                f"The graph's operator {node.op_type} ('{node.name}') is of the domain {node.domain}, "
                f"which the {lowering} lowering does not use."
            )
        if node.domain == "" and node.op_type not in known:
            try:
                onnx.defs.get_schema(node.op_type, opset, "")
            except onnx.defs.SchemaError as error:
                raise ExportError(
                    f"The graph's operator {node.op_type} ('{node.name}') is newer than opset {opset}, "
                    f"which the {lowering} lowering is pinned to."
                ) from error
        node.version = None
    model.opset_imports.clear()
    model.opset_imports.update({"": opset, **dict.fromkeys(domains, 1)})
    model.ir_version = ir_version


def fix_shapes(graph: ir.Graph, capacity: int) -> None:
    """Writes batch 1 and the caches' fixed number of slots into the shapes of the graph's inputs and outputs."""
    for value in (*graph.inputs, *graph.outputs):
        shape = value.shape
        if len(shape) == 4:
            value.shape = ir.Shape([1, shape[1], capacity, shape[3]])
        elif len(shape) > 1:
            value.shape = ir.Shape([1, shape[1] if shape[1] == LOGITS_ROWS else "rows", *shape[2:]])
