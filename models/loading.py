"""From a name to a Model: build on fixed random weights, draw inputs, calibrate batch norm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from models import custom, registry
from models.model import Model
from models.registry import BadModel

if TYPE_CHECKING:
    import torch
    from torch import nn

WEIGHTS_SEED = 0
# Out of the way of the seeds that callers give to Model.fresh_inputs: those inputs must be others.
INPUTS_SEED = 2**48
CALIBRATION_SEED = 2**48 + 1
CALIBRATION_BATCH = 2

_ahead: dict[str, nn.Module] = {}  # one module at most, by what it is of


def build_ahead(name: str, *, training: bool = False, **options: Any) -> None:
    """Build a network of the zoo on the CPU, for the next `load` in this process if that asks for the same.

    Raises BadModel as `load`.
    """
    entry = registry.find(name)
    options = entry.options(options)
    _ahead.clear()
    _ahead[_key(name, training, options)] = _built(entry, training, options)


def load(name: str, batch: int, *, training: bool = False, device: str | torch.device = "cpu", **options: Any) -> Model:
    """A model of the zoo, or `custom` with `factory="package.module:function"`, with example inputs of that batch.

    The weights are random, the same in every process, and the caller's random state is left alone. In eval form
    (the default) the batch norms of the zoo hold the statistics of a random batch; in training form the module is in
    train mode, with the auxiliary heads that its source trains with. On device "meta" nothing is allocated or
    computed: enough to count or to export. Raises BadModel with one line for anything wrong in the request.
    """
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise BadModel(f"batch must be a positive integer, not {batch!r}")
    if name == "custom":
        return custom.load(batch, training=training, device=device, **options)
    entry = registry.find(name)
    options = entry.options(options)

    import torch

    on_meta = torch.device(device).type == "meta"
    key = _key(name, training, options)
    if on_meta:
        with torch.device("meta"):
            module = _built(entry, training, options)
    else:
        module = _ahead.pop(key) if key in _ahead else _built(entry, training, options)
    module = module.train(training).to(device)
    drawn = entry.inputs(**options)

    def draw(batch: int, seed: int) -> tuple[torch.Tensor, ...]:
        if on_meta:
            fake = [torch.long if of.vocabulary else torch.float32 for of in drawn]
            return tuple(
                torch.empty((batch, *of.shape), dtype=dtype, device="meta") for of, dtype in zip(drawn, fake, strict=True)
            )
        generator = torch.Generator().manual_seed(seed)
        return tuple(of.draw(batch, generator).to(device) for of in drawn)

    if not training and not on_meta:
        from models.calibration import calibrate

        calibrate(module, draw(CALIBRATION_BATCH, CALIBRATION_SEED))
    return Model(name, module, draw(batch, INPUTS_SEED), drawn)


def _built(entry: registry.Entry, training: bool, options: dict[str, Any]) -> nn.Module:
    """The network on its random weights, the same in every process."""
    import torch

    with torch.random.fork_rng(devices=[]):  # only the CPU's generator: torch.manual_seed would reset every GPU's as well
        torch.random.default_generator.manual_seed(WEIGHTS_SEED)
        return entry.build(training, **options)


def _key(name: str, training: bool, options: dict[str, Any]) -> str:
    return repr((name, training, sorted(options.items())))
