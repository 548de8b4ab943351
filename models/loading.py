"""From a name to a Model: build on fixed random weights, draw inputs, calibrate batch norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from conf import Options, Value
from models import custom, registry
from models.model import Model
from models.registry import BadModel
from models.table_options import TableOptions

if TYPE_CHECKING:
    import torch
    from torch import nn

WEIGHTS_SEED = 0
# Beyond the seeds that callers give to Model.fresh_inputs, so that no fresh inputs equal the example or the calibration's.
INPUTS_SEED = 2**48
CALIBRATION_SEED = 2**48 + 1
CALIBRATION_BATCH = 2

_ahead: dict[str, nn.Module] = {}  # at most one module, by the request that it answers


def build_ahead(name: str, *, training: bool = False, **options: Value) -> None:
    """Build a network of the zoo on the CPU for the next `load` of the same request in this process.

    One that depends on the batch or the device is not built; what it imports is imported.

    Raises:
        BadModel: the name or an option is wrong.
    """
    entry = registry.find(name)
    options = entry.options(options)
    _ahead.clear()
    if entry.takes_batch or entry.is_made_in_place:
        _built(entry, training, options, 1, "meta")
    else:
        _ahead[_key(name, training, options)] = _built(entry, training, options, 1, "cpu")


def load(name: str, batch: int, *, training: bool = False, device: str | torch.device = "cpu", **options: Value) -> Model:
    """A model of the zoo, or `custom`, with example inputs of that batch.

    The weights are random and the same in every process. The caller's random state does not change.

    Args:
        name: of the zoo; "custom" takes the option `factory="package.module:function"`.
        batch: the first dimension of every input.
        training: False is the eval form, whose batch norms hold the statistics of a random batch. True is the train form,
            in train mode, with the auxiliary heads that its source trains with.
        device: "meta" allocates and computes nothing; that is enough to count or to export.
        options: the model's own, as in conf/model/NAME.yaml.

    Raises:
        BadModel: the request is wrong; the message is one line.
    """
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise BadModel(f"batch must be a positive integer, not {batch!r}")
    if name == "custom":
        return custom.load(batch, training=training, device=device, options=options)
    if name == registry.PIPELINE:
        TableOptions(**options)  # type: ignore[arg-type]
        raise BadModel("a pipeline over a table is no network that could be called: runner=accuracy measures it")
    if name in registry.SERVED:
        raise BadModel(f"model {name} is served, token by token: runner=serving and system=orca take it")
    entry = registry.find(name)
    options = entry.options(options)

    import torch

    on_meta = torch.device(device).type == "meta"
    key = _key(name, training, options)
    place = device if on_meta or entry.is_made_in_place else "cpu"
    module = _ahead.pop(key) if key in _ahead and not on_meta else _built(entry, training, options, batch, place)
    module = module.train(training).to(device)
    descriptions = entry.inputs(**options)

    def draw(batch: int, seed: int) -> tuple[torch.Tensor, ...]:
        if on_meta:
            dtypes = [torch.long if description.vocabulary else torch.float32 for description in descriptions]
            pairs = zip(descriptions, dtypes, strict=True)
            return tuple(torch.empty((batch, *d.shape), dtype=dtype, device="meta") for d, dtype in pairs)
        generator = torch.Generator().manual_seed(seed)
        return tuple(description.draw(batch, generator).to(device) for description in descriptions)

    if not training and not on_meta:
        from models.calibration import calibrate

        calibrate(module, draw(CALIBRATION_BATCH, CALIBRATION_SEED))
    return Model(name, module, draw(batch, INPUTS_SEED), descriptions)


def _built(entry: registry.Entry, training: bool, options: Options, batch: int, device: str | torch.device) -> nn.Module:
    """The network on its random weights, the same in every process that makes it on such a device."""
    import torch

    from models.shapes import on_no_device

    index = torch.device(device).index or 0
    is_on_gpu = torch.device(device).type == "cuda"
    place = on_no_device() if torch.device(device).type == "meta" else torch.device(device)
    # Only the generators that are drawn from: torch.manual_seed would reset every GPU's as well.
    with torch.random.fork_rng(devices=[index] if is_on_gpu else []), place:
        torch.random.default_generator.manual_seed(WEIGHTS_SEED)
        if is_on_gpu:
            torch.cuda.default_generators[index].manual_seed(WEIGHTS_SEED)
        return entry.build(training, *([batch] if entry.takes_batch else []), **options)


def _key(name: str, training: bool, options: Options) -> str:
    return repr((name, training, sorted(options.items())))
