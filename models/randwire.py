"""RandWire (Xie et al. 2019, "Exploring Randomly Wired Neural Networks for Image Recognition"), WS(32, 4, 0.75)."""

from __future__ import annotations

import networkx as nx
import torch
import torch.nn.functional as F
from torch import nn

from conf import not_one_of
from models.registry import BadModel, images, register

SIZES = ("small", "large")
NODES, NEIGHBOURS, REWIRING = 32, 4, 0.75


def wiring(nodes: int, seed: int) -> list[list[int]]:
    """The predecessors of each node of a Watts-Strogatz graph, as a DAG: edges go to the larger number (section 3.2)."""
    graph = nx.connected_watts_strogatz_graph(nodes, NEIGHBOURS, REWIRING, seed=seed)
    return [sorted(neighbour for neighbour in graph[node] if neighbour < node) for node in range(nodes)]


class SeparableConvolution(nn.Sequential):
    """A 3x3 separable convolution: depthwise and pointwise, with nothing between them."""

    def __init__(self, channels_in: int, channels: int, stride: int):
        super().__init__(
            nn.Conv2d(channels_in, channels_in, 3, stride, 1, groups=channels_in, bias=False),
            nn.Conv2d(channels_in, channels, 1, bias=False),
        )


class Node(nn.Module):
    """A node: the sum of its inputs, each with a learned positive weight; then ReLU, convolution, batch norm."""

    def __init__(self, channels_in: int, channels: int, inputs: int, stride: int):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(inputs)) if inputs > 0 else None
        self.convolution = SeparableConvolution(channels_in, channels, stride)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        total = inputs[0]
        if self.weights is not None:
            weights = torch.sigmoid(self.weights).unbind()
            total = inputs[0] * weights[0]
            for x, weight in zip(inputs[1:], weights[1:], strict=True):
                total = torch.addcmul(total, x, weight)
        return self.norm(self.convolution(F.relu(total)))


class Stage(nn.Module):
    """A random graph of nodes: [B, channels_in, H, W] -> [B, channels, H/2, W/2].

    Nodes without predecessors read the stage's input at a stride of 2; nodes without successors are averaged.
    """

    def __init__(self, channels_in: int, channels: int, nodes: int, seed: int):
        super().__init__()
        self.predecessors = wiring(nodes, seed)
        inner = {p for predecessors in self.predecessors for p in predecessors}
        self.outputs = [node for node in range(nodes) if node not in inner]
        self.nodes = nn.ModuleList(
            Node(channels if predecessors else channels_in, channels, len(predecessors), 1 if predecessors else 2)
            for predecessors in self.predecessors
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states: list[torch.Tensor] = []
        for node, predecessors in zip(self.nodes, self.predecessors, strict=True):
            states.append(node(*(states[p] for p in predecessors)) if predecessors else node(x))
        total = states[self.outputs[0]]
        for output in self.outputs[1:]:
            total = total + states[output]
        return total / len(self.outputs)


class RandWire(nn.Module):
    """The network of table 1, [B, 3, 224, 224] -> [B, 1000]. `regular` wires the second stage too, and is wider."""

    def __init__(self, channels: int, regular: bool, seed: int):
        super().__init__()
        c = channels
        self.stem = nn.Sequential(nn.Conv2d(3, c // 2, 3, 2, 1, bias=False), nn.BatchNorm2d(c // 2))
        if regular:
            plan = [(c // 2, c, NODES // 2), (c, 2 * c, NODES), (2 * c, 4 * c, NODES), (4 * c, 8 * c, NODES)]
        else:
            self.stem.extend([nn.ReLU(), nn.Conv2d(c // 2, c, 3, 2, 1, bias=False), nn.BatchNorm2d(c)])
            plan = [(c, c, NODES), (c, 2 * c, NODES), (2 * c, 4 * c, NODES)]
        self.stages = nn.Sequential(*(Stage(*size, seed=seed + i) for i, size in enumerate(plan)))
        last = plan[-1][1]
        self.head = nn.Sequential(nn.ReLU(), nn.Conv2d(last, 1280, 1, bias=False), nn.BatchNorm2d(1280), nn.ReLU())
        self.classifier = nn.Linear(1280, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(self.stages(self.stem(x)))
        return self.classifier(F.adaptive_avg_pool2d(x, 1).flatten(1))


@register(images(224))
def randwire(training: bool, *, size: str = "small") -> nn.Module:
    """RandWire-WS in the small regime (C = 78) or, with `size="large"`, the regular one at C = 154 (tables 2 and 4)."""
    if wrong := not_one_of("model.size", size, SIZES):
        raise BadModel(wrong)
    return RandWire(78, regular=False, seed=SEED) if size == "small" else RandWire(154, regular=True, seed=SEED)


# The graphs that networkx draws from this seed give networks of the published (mean) size.
SEED = 22
