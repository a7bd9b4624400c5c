"""Makes the nodes that take another node's place, one behind the other, with their constants."""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from export.graph_edit import add_initializer


class Writer:
    """Nodes in the order they were made; they are in no graph until they are put into one.

    Attributes:
        graph: Where the constants go, at once; equal ones are there once.
    """

    def __init__(self, graph: ir.Graph) -> None:
        """Makes nothing yet."""
        self.graph = graph
        self._tape = ir.tape.Tape()

    @property
    def nodes(self) -> Sequence[ir.Node]:
        """What was made, in order."""
        return self._tape.nodes

    def op(self, op_type: str, *inputs: ir.Value, name: str | None = None, **attributes: object) -> ir.Value:
        """Makes a node of the default domain, and returns its one output; `name` is the node's."""
        value: ir.Value = self._tape.op(op_type, inputs, attributes=attributes or None, name=name)
        return value

    def integers(self, *values: int) -> ir.Value:
        """Returns a constant int64 [len(values)]."""
        name = "integers." + ".".join(map(str, values))
        return add_initializer(self.graph, name, np.array(values, np.int64))

    def scalar(self, value: float, element_type: np.dtype | type) -> ir.Value:
        """Returns a constant of one element type and no dimensions."""
        number = np.array(value, element_type)
        return add_initializer(self.graph, f"{number.dtype}.{number.item()}", number)

    def reshape(self, value: ir.Value, *shape: int) -> ir.Value:
        """Reshapes; 0 keeps a width, -1 takes what is left."""
        return self.op("Reshape", value, self.integers(*shape))

    def transpose(self, value: ir.Value, *order: int) -> ir.Value:
        """Puts the axes into another order."""
        return self.op("Transpose", value, perm=list(order))

    def cast(self, value: ir.Value, element_type: ir.DataType) -> ir.Value:
        """Casts."""
        return self.op("Cast", value, to=element_type)
