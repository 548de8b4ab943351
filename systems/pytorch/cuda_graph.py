"""The eager module captured into one CUDA Graph on one stream: no scheduling at run time, no concurrency."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from systems.base import Loss, Prepared, System, Unsupported
from systems.preparing import one_at_a_time, uncapturable
from systems.scheduling.execution.members import casts, check_casts
from systems.scheduling.graph.examples import check_dense
from systems.scheduling.graph.program import check_inputs
from systems.training.held_module import HeldModule
from systems.training.optimizers import StaticOptimizer
from systems.training.restore import state_kept
from systems.training.step import undone

WARM_UP_RUNS = 3


class CudaGraph(System):
    name = "cuda_graph"

    def unsupported(self, device: str) -> str | None:
        return None if device == "cuda" else "a CUDA Graph needs a CUDA device"

    def prepare(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
        check_dense(inputs)
        self.check_supported(inputs)
        return CapturedModule(module, inputs, lambda: state_kept(module))

    def prepare_training(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, inputs: tuple[Tensor, ...], target: Tensor
    ) -> Prepared:
        check_dense((*inputs, target))
        self.check_supported(inputs)
        return CapturedStep(module, optimizer, loss, (*inputs, target))


class CapturedModule(Prepared):
    """Replays a captured module.

    Invariant: the graph reads and writes static buffers alone. A call copies its inputs in and its outputs out, so that the
    outputs stay valid after the next replay.

    Args:
        module: what is captured.
        inputs: of the shapes, dtypes and device that calls will have.
        warming_up: the context in which the module runs before the capture.
    """

    is_captured = True

    @torch.no_grad()
    def __init__(
        self,
        module: Callable[..., Any],
        inputs: tuple[Tensor, ...],
        warming_up: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        # CUDA's bindings: PyTorch for a CPU comes without
        from systems.scheduling.execution.context_switch import switch_contexts
        from systems.scheduling.execution.cuda_streams import Streams
        from systems.scheduling.execution.graph_copies import GraphCopies

        check_dense(inputs)
        self.device = inputs[0].device
        self.inputs = [torch.empty_like(x).copy_(x) for x in inputs]
        self.streams = Streams(self.device)
        self.graph: torch.cuda.CUDAGraph | None = torch.cuda.CUDAGraph(keep_graph=True)
        self.copies = GraphCopies(self.device)
        with one_at_a_time:
            (side,) = self.streams.take([True])
            side.torch.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(side.torch), warming_up():
                for _ in range(WARM_UP_RUNS):
                    module(*self.inputs)
            torch.cuda.synchronize(self.device)
            try:
                with torch.cuda.graph(self.graph, stream=side.torch, capture_error_mode="thread_local"):
                    self.copies.capture_inputs(self.inputs, side.handle)
                    outputs, self.output_spec = tree_flatten(module(*self.inputs))
                    self.copies.capture_outputs(outputs, lambda x: True, side.handle)
            except RuntimeError as error:
                raise uncapturable(error) from error
            with torch.cuda.device(self.device):
                self.graph.instantiate()
            self.copies.bind(self.graph.raw_cuda_graph(), self.graph.raw_cuda_graph_exec())
            switch_contexts(self.device)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes. pool: the device's memory in the graph's private pool. workspaces: cuBLAS's. inputs: the static inputs."""
        if self.graph is None:
            return {}
        from systems.scheduling.execution.cuda_streams import pool_bytes

        return {
            "pool": pool_bytes(self.graph.pool()),
            "workspaces": self.streams.workspace_bytes,
            "inputs": sum(x.untyped_storage().nbytes() for x in self.inputs),
        }

    @torch.no_grad()
    def __call__(self, *inputs: Tensor) -> Any:
        if self.graph is None:
            raise RuntimeError("this executor is closed")
        return tree_unflatten(self.copies.run(inputs, self.graph.replay), self.output_spec)

    def without_copies(self, *inputs: Tensor) -> Callable[[], object]:
        self(*inputs)
        return self._replay

    def _replay(self) -> None:
        assert self.graph is not None, "without_copies comes before close"
        self.copies.turn_off()
        self.graph.replay()

    def close(self) -> None:
        self.graph, self.inputs = None, []
        self.copies.close()
        self.streams.close()


class CapturedStep(CapturedModule):
    """A whole step of training, captured: forward, loss, backward and the update. The last input is the target."""

    @torch.no_grad()
    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, inputs: tuple[Tensor, ...]):
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]

        def differentiate(*inputs: Tensor) -> tuple[Tensor, dict[Tensor, Tensor]]:
            with torch.enable_grad():
                value = loss(module(*inputs[:-1]), inputs[-1])
                gradients = torch.autograd.grad(value, trained, allow_unused=True)
            return value.detach(), {p: g for p, g in zip(trained, gradients, strict=True) if g is not None}

        with undone(module):
            static = StaticOptimizer.of(optimizer, differentiate(*inputs)[1])
        self.optimizer, self.module, self.casts = static, HeldModule(module), casts()

        def step(*inputs: Tensor) -> Tensor:
            value, gradients = differentiate(*inputs)
            for i, members in enumerate(static.groups):
                if members:
                    static.update(i, members, [gradients[p] for p in members], static.moments_of(members), static.rates[i])
            return value

        moments = [t for named in static.moments.values() for t in named.values()]
        super().__init__(step, inputs, lambda: undone(module, *moments))
        if assigned := self.module.replaced():
            self.module.put_back()
            self.close()
            raise Unsupported(f"its forward assigns {assigned[0]}, which a replay of a CUDA Graph would not")
        self.changed = [*static.moments, *moments, *module.buffers()]

    @torch.no_grad()
    def __call__(self, *inputs: Tensor) -> Any:
        """One step. Raises as TrainingStep does."""
        check_inputs(inputs, self.inputs)
        check_casts(self.casts)
        self.module.check()
        self.optimizer.refresh()
        value = super().__call__(*inputs)
        torch.autograd.graph.increment_version(self.changed)  # a replay writes them unseen by autograd
        return value
