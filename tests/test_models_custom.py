"""Models of a user's own: factories, good and bad."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import models


def test_fresh_inputs_of_a_custom_model_are_its_own_values_shuffled() -> None:
    image = torch.rand(1, 4, 8, 8).contiguous(memory_format=torch.channels_last)
    model = models.Model("custom", nn.Identity(), (torch.arange(100), image, torch.zeros(50)))
    ids, fresh, constant = model.fresh_inputs(0)
    assert torch.equal(ids.sort().values, torch.arange(100))
    assert not torch.equal(ids, torch.arange(100))
    assert torch.equal(fresh.flatten().sort().values, image.flatten().sort().values)
    assert fresh.is_contiguous(memory_format=torch.channels_last)
    assert constant.std() > 0.5


FACTORIES = """
import torch
from torch import nn

def make(batch):
    return nn.Sequential(nn.Linear(4, 2), nn.Dropout()), (torch.ones(batch, 4),)

def raises(batch):
    raise RuntimeError("two\\nlines")

def leaves(batch):
    raise SystemExit(3)

def single(batch):
    return nn.Linear(4, 2)

def nothing(batch):
    return None

def triple(batch):
    return nn.Linear(4, 2), (torch.ones(1),), 3

def function_first(batch):
    return make, (torch.ones(1),)

def bare_tensor(batch):
    return nn.Linear(4, 2), torch.ones(batch, 4)

def no_inputs(batch):
    return nn.Linear(4, 2), ()

def number(batch):
    return nn.Linear(4, 2), (torch.ones(1), 3)

class ByName(nn.Linear):
    def forward(self, *, mask, x):
        return super().forward(x * mask)

    def train(self, mode=True):
        self.trained = mode
        return super().train(mode)

def by_name(batch):
    return ByName(4, 2), {"x": torch.ones(batch, 4), "mask": torch.zeros(4)}

def by_number(batch):
    return nn.Linear(4, 2), {0: torch.ones(batch, 4)}

def fixed(batch):
    return nn.Linear(4, 2), (torch.ones(1, 3, 4), torch.ones(()))

def long(batch):
    return nn.Linear(4, 2), (torch.ones(1, 64, 4),)

def sequence_first(batch):
    return nn.Linear(4, 2), (torch.ones(1, batch, 4),)

def only_large(batch):
    assert batch > 1
    return long(batch)

def only_of_large(batch):
    return long(batch) if batch > 1 else (nn.Linear(4, 2), 3)

def folded(batch):
    return nn.Linear(4, 2), (torch.ones(()), torch.ones(2 * batch, 4))

def lazy(batch):
    return nn.Sequential(nn.LazyLinear(2)), (torch.ones(batch, 4),)

def lazy_state(batch):
    return nn.LazyBatchNorm1d(affine=False), {"input": torch.ones(batch, 4)}

def called(batch):
    module, inputs = lazy(batch)
    module(*inputs)
    return module, inputs

constant = 5
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package of factories in the working directory; its name."""
    package = tmp_path / "factories_of_a_test"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "good.py").write_text(FACTORIES)
    (package / "broken.py").write_text("def make(:\n")
    (package / "needs.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield package.name
    for name in [name for name in sys.modules if name.startswith(package.name)]:
        del sys.modules[name]


def test_a_custom_model(factories: str) -> None:
    model = models.load("custom", 3, factory=f"{factories}.good:make")
    assert model.name == "custom"
    assert not any(module.training for module in model.module.modules())
    assert model.module(*model.inputs).shape == (3, 2)
    assert models.load("custom", 3, factory=f"{factories}.good:make", training=True).module.training
    assert models.count(model.module, model.inputs) == models.Counts(parameters=10, macs=24)
    model = models.load("custom", 3, factory=f"{factories}.good:called")
    assert model.module(*model.inputs).shape == (3, 2)


def test_a_custom_model_whose_inputs_go_by_name(factories: str) -> None:
    loaded = models.load("custom", 3, factory=f"{factories}.good:by_name")
    model = models.place(loaded, device="cpu", precision="bf16", layout="contiguous")
    assert [list(x.shape) for x in model.inputs] == [[3, 4], [4]]
    assert list(model.module.state_dict()) == ["weight", "bias"]
    for x in model.module(*model.inputs):
        assert x.dtype == torch.bfloat16 and torch.equal(x, model.module.get_parameter("bias"))  # the mask hides all
    own = model.module.train().module
    assert own.training and own.trained  # by the module's own method


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (None, "model custom needs model.factory=mypkg.mymodule:make"),
        ("{}.good.make", "is not of the form mypkg.mymodule:make"),
        ("{}.good:", "is not of the form"),
        (":make", "is not of the form"),
        ("{}/good.py:make", "/good.py is a file's path: write {}.good:make, from the folder that holds {}"),
        ("./{}/good:make", "./{}/good is a file's path: write {}.good:make, from the folder that holds {}"),
        ("/tmp/{}.py:make", "/{}.py is a file's path: write {}:make, from the folder that holds {}"),
        ("../{}.py:make", "{}.py is a file's path: write {}:make, from the folder that holds {}"),
        ("{}.bad:make", "there is no module {}.bad in "),
        ("nowhere_at_all.bad:make", "there is no module nowhere_at_all in "),
        ("{}.broken:make", "importing {}.broken raised SyntaxError"),
        ("{}.needs:make", "raised ModuleNotFoundError: No module named 'a_module_that_is_not_there'"),
        (".good:make", "importing .good raised TypeError"),
        ("{}.good:mak", "module {}.good has no 'mak'; did you mean make?"),
        ("{}.good:constant", "is an int, not a function"),
        ("{}.good:raises", "raised RuntimeError: two lines ({}/good.py:"),
        ("{}.good:leaves", "raised SystemExit: 3"),
        ("{}.good:single", "returned a Linear; it must return (nn.Module, (Tensor, ...))"),
        ("{}.good:nothing", "returned None; it must return"),
        ("{}.good:triple", "returned a tuple of 3; it must return"),
        ("{}.good:function_first", "returned a function first; it must return"),
        ("{}.good:bare_tensor", "returned a Tensor as the inputs; it must return"),
        ("{}.good:no_inputs", "returned no inputs; it must return"),
        ("{}.good:number", "returned an int as input 1; it must return"),
        ("{}.good:by_number", "returned inputs by an int; it must return"),
        ("{}.good:lazy", "returned a module whose 0.weight has no shape yet: call the module once in the factory"),
        ("{}.good:lazy_state", "returned a module whose running_mean has no shape yet: call the module once in the factory"),
    ],
)
def test_a_bad_factory_is_one_line(factories: str, factory: str | None, message: str) -> None:
    factory = factory and factory.format(factories)
    with pytest.raises(models.BadModel) as caught:
        models.load("custom", 1, factory=factory)
    assert message.replace("{}", factories) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_factory_has_to_use_its_batch(factories: str) -> None:
    assert models.load("custom", 1, factory=f"{factories}.good:fixed").inputs[0].shape == (1, 3, 4)
    assert models.load("custom", 64, factory=f"{factories}.good:folded").inputs[1].shape == (128, 4)
    assert models.load("custom", 64, factory=f"{factories}.good:sequence_first").inputs[0].shape == (1, 64, 4)
    for name in ("only_large", "only_of_large"):
        assert models.load("custom", 64, factory=f"{factories}.good:{name}").inputs[0].shape == (1, 64, 4)
    with pytest.raises(models.BadModel, match="returned inputs of 1x64x4 for batch=64"):  # a sequence is no batch
        models.load("custom", 64, factory=f"{factories}.good:long")
    wrong = "returned inputs of 1x3x4 and no dimension for batch=64: make(batch) has to use its batch"
    with pytest.raises(models.BadModel, match=re.escape(wrong)):
        models.load("custom", 64, factory=f"{factories}.good:fixed")


def test_a_custom_model_takes_only_a_factory(factories: str) -> None:
    with pytest.raises(models.BadModel, match="model custom has no option 'sequence'"):
        models.load("custom", 1, factory=f"{factories}.good:make", sequence=3)
