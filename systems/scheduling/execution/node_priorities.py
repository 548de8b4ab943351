"""Priorities of the kernels of a CUDA Graph."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from cuda.bindings import runtime as cudart

from .cuda_streams import checked, num_captured, num_nodes

KERNEL = cudart.cudaGraphNodeType.cudaGraphNodeTypeKernel
BY_NODE = int(cudart.cudaGraphInstantiateFlags.cudaGraphInstantiateFlagUseNodePriority)


class NodePriorities:
    """Notes what nodes each operator adds to a graph while that is captured, and then gives its kernels their priority.

    CUDA lists a graph's nodes in the order in which they were added.

    Args:
        by_operator: of operator v [v], 0 the lowest; empty for a graph without priorities.
    """

    def __init__(self, by_operator: Sequence[int]):
        self.by_operator = by_operator
        self.added: list[tuple[range, int]] = []  # numbers of nodes, and their priority

    @contextmanager
    def operator(self, v: int, stream: Any) -> Iterator[None]:
        """Around the launch of operator v on a stream that is being captured."""
        if not self.by_operator:
            yield
            return
        first = num_captured(stream)
        yield
        self.added.append((range(first, num_captured(stream)), self.by_operator[v]))

    def give(self, graph: Any) -> int:
        """Set them in the captured graph. Returns the flags that it is instantiated with."""
        if not self.by_operator:
            return 0
        nodes, _ = checked(cudart.cudaGraphGetNodes(graph, num_nodes(graph)))
        _, highest = checked(cudart.cudaDeviceGetStreamPriorityRange())  # CUDA's are the lower, the more urgent
        for numbers, priority in self.added:
            value = cudart.cudaKernelNodeAttrValue()
            value.priority = max(-priority, highest)
            for i in numbers:
                if checked(cudart.cudaGraphNodeGetType(nodes[i])) == KERNEL:
                    attribute = cudart.cudaKernelNodeAttrID.cudaLaunchAttributePriority
                    checked(cudart.cudaGraphKernelNodeSetAttribute(nodes[i], attribute, value))
        return BY_NODE
