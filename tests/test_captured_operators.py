"""A capture runs what eager execution runs: no copy, fill or cast more, on any network of the zoo."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_models_networks import CHEAP, slow_of
from torch.utils._python_dispatch import TorchDispatchMode

import models
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.effects import is_view
from systems.scheduling.graph.part import UNINITIALIZED

UNCOMPUTED = (
    "item",
    "_local_scalar_dense",
    "lift_fresh",
    "new_empty",
)  # beside views, and memory that nothing is written to
FUSED_ATTENTION = {"_native_multi_head_attention": -2, "addmm": 4, "_scaled_dot_product_flash_attention_for_cpu": 2}
# What a capture runs more than eager execution, by operator.
MORE: dict[str, dict[str, int]] = {
    "swin_t": {"fill": -18, "write_parts": 2},  # a kernel for each part as well, and one for all that has been written
    "vit_b16": FUSED_ATTENTION,  # one call, and what it calls within
}
QUICK = ("bert", "deepfm", "dlrm", "gptj_6b_decode", "qwen3_moe", "squeezenet", "swin_t", "t5", "vit_b16", "whisper_small")


class Dispatched(TorchDispatchMode):
    """Counts what is dispatched within, but for views. What writes in place counts as what returns the same."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not is_view(func) and func not in UNINITIALIZED and name not in UNCOMPUTED:
            self.counts[name.removesuffix("_")] += 1
        return func(*args, **(kwargs or {}))


def dispatched(call: Callable[[], object]) -> Counter[str]:
    with torch.no_grad(), Dispatched() as mode:
        call()
    return mode.counts


@pytest.mark.parametrize("name", slow_of(CHEAP, *CHEAP.keys() - QUICK))
def test_a_capture_runs_the_operators_of_eager_execution(name: str) -> None:
    options = CHEAP[name]
    model = models.load(name, 1, device="cpu" if "size" in options else "meta", **options)
    eager = dispatched(lambda: model.module(*model.inputs))
    program = capture(model.module, model.inputs)
    captured = dispatched(lambda: program.run(model.inputs))
    assert {k: captured[k] - eager[k] for k in eager | captured if captured[k] != eager[k]} == MORE.get(name, {})
    assert sum(eager.values()) > 8
