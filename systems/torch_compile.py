"""torch.compile through Inductor."""

import shutil
from typing import Any

import torch
from torch import Tensor, nn

from systems.base import BadOption, Prepared, PreparedModule, System, Unsupported
from systems.training import Loss, ModuleStep, undone

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
WARM_UP_RUNS = 3  # CUDA Graph Trees warm up, record and replay in the first three calls


class TorchCompile(System):
    """mode: one of MODES. channels_last: compile a channels-last copy of the module; the call then converts its inputs."""

    name = "torch_compile"
    own_randomness = True  # Inductor has a generator of its own

    def __init__(self, mode: str = "reduce-overhead", channels_last: bool = False):
        if mode not in MODES:
            raise BadOption(f"system.mode is {mode}, not one of {', '.join(MODES)}")
        self.mode, self.channels_last = mode, channels_last

    def unsupported(self, device: str) -> str | None:
        if not any(shutil.which(compiler) for compiler in ("g++", "c++", "clang++", "gcc")):
            return "Inductor needs a C++ compiler (g++ or clang++) on the PATH"
        return None

    def prepare(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
        if self.channels_last:
            module = _channels_last_copy(module)
        torch._dynamo.reset()
        compiled = torch.compile(module, mode=self.mode, dynamic=False)
        prepared = PreparedCompiled(compiled, self.channels_last, self.mode != "default" and inputs[0].is_cuda)
        try:
            for _ in range(WARM_UP_RUNS):
                prepared(*inputs)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            raise Unsupported(f"Inductor cannot compile it: {str(error).strip().splitlines()[0]}") from error
        return prepared

    def prepare_training(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, inputs: tuple[Tensor, ...], target: Tensor
    ) -> Prepared:
        """Module and loss compiled together, forward and backward; the optimizer in its fused form."""
        if self.channels_last:
            module.to(memory_format=torch.channels_last)
        if not optimizer.state:
            for group in optimizer.param_groups:
                group["foreach"], group["fused"] = False, True
        torch._dynamo.reset()
        compiled = torch.compile(lambda *given: loss(module(*given[:-1]), given[-1]), mode=self.mode, dynamic=False)
        step = CompiledStep(compiled, optimizer, self.channels_last)
        try:
            with undone(module):
                for _ in range(WARM_UP_RUNS):
                    optimizer.zero_grad()  # a gradient lies where the next run of a CUDA Graph writes
                    step.differentiate(*inputs, target)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            raise Unsupported(f"Inductor cannot compile it: {str(error).strip().splitlines()[0]}") from error
        return step


class CompiledStep(ModuleStep):
    """forward: compiled, of inputs and target, to the loss."""

    def __init__(self, forward: Any, optimizer: torch.optim.Optimizer, channels_last: bool):
        super().__init__(forward, optimizer, lambda value, _: value)
        self.channels_last = channels_last

    def differentiate(self, *inputs: Tensor) -> Tensor:
        if self.channels_last:
            inputs = tuple(_to_channels_last(x) for x in inputs)
        torch.compiler.cudagraph_mark_step_begin()
        return super().differentiate(*inputs, inputs[-1]).clone()  # the next step overwrites what a CUDA Graph returns


class PreparedCompiled(PreparedModule):
    def __init__(self, compiled: Any, channels_last: bool, captured: bool):
        super().__init__(compiled)
        self.channels_last, self.captured = channels_last, captured

    @torch.no_grad()
    def __call__(self, *inputs: Tensor) -> Any:
        if self.channels_last:
            inputs = tuple(_to_channels_last(x) for x in inputs)
        torch.compiler.cudagraph_mark_step_begin()
        outputs = self.call(*inputs)
        # With CUDA Graphs the next call overwrites the outputs; every other system's stay valid.
        return torch.utils._pytree.tree_map_only(Tensor, Tensor.clone, outputs) if self.captured else outputs


def _to_channels_last(x: Tensor) -> Tensor:
    return x.to(memory_format=torch.channels_last) if x.dim() == 4 else x


def _channels_last_copy(module: nn.Module) -> nn.Module:
    import copy

    return copy.deepcopy(module).to(memory_format=torch.channels_last)
