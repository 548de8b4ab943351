"""The list of passes: its switches, what a pass may import, and how one is added."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import conf
from systems.base import BadOption
from systems.profiling.timing import Timer
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.program import Program
from systems.scheduling.passes import rewriting
from systems.scheduling.passes.context import Context, Rewritten
from systems.scheduling.passes.rewriting import PASSES, SWITCHES, Pass, Rewriting
from systems.weave.changes import OWN

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "systems" / "scheduling" / "passes"


def test_each_switch_has_a_line_in_conf() -> None:
    for choice, value in (("none", False), ("all", True)):
        switches = dict.fromkeys(SWITCHES, value) | dict.fromkeys(OWN, False)
        assert conf.options("rewriting", choice) == switches
    assert all(conf.options("system", name)[kind] for name in ("weave", "weave_or_peers") for kind in OWN)


@pytest.mark.parametrize("options", [{"fuse_element": True}, {"fuse_element": False}])
def test_a_wrong_switch_is_refused_with_the_nearest(options: dict[str, bool]) -> None:
    with pytest.raises(BadOption, match=r"system\.fuse_element .*did you mean fuse_elementwise\?"):
        Rewriting(**options)
    with pytest.raises(BadOption, match="true or false"):
        Rewriting(fuse_elementwise="yes")  # type: ignore[arg-type]


def test_it_measures_if_a_pass_that_runs_does() -> None:
    assert Rewriting() == Rewriting(merge_linears=False) != Rewriting(merge_linears=True)
    unmeasured = {
        "replace_bags",
        "fold_constants",
        "merge_equal",
        "fold_batch_norm",
        "fold_scales",
        "widen_convolutions",
        "fuse_elementwise",
    }
    assert not Rewriting().measures and not Rewriting(**dict.fromkeys(unmeasured, True)).measures
    for switch in set(SWITCHES) - unmeasured:
        assert Rewriting(**{switch: True}).measures
    assert [p.run.__name__ for p in Rewriting(select_layouts=True).passes] == ["select_kernels"]


def test_passes_run_in_order_and_know_what_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def named(name: str, asks: bool = False) -> Pass:
        def run(program: Program, context: Context) -> Rewritten:
            ran.append(name)
            if asks:
                context.later(program)
            return program, []

        return Pass(run, (name,), measures=asks)

    passes = (named("a"), named("b", True), named("c"), named("off"), named("d", True), named("e"))
    monkeypatch.setattr(rewriting, "PASSES", passes)
    monkeypatch.setattr(rewriting, "SWITCHES", tuple("abcde"))
    program = capture(nn.ReLU(), (torch.ones(2),))
    Rewriting(**dict.fromkeys("edcba", True)).apply(program, Timer(torch.device("cpu")))
    # b asks what c and e would do, since they measure nothing; d asks e.
    assert ran == ["a", "b", "c", "e", "c", "d", "e", "e"]


def imported(file: Path) -> set[str]:
    """The files of this folder that one of them imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            names |= {node.module} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("systems.scheduling.passes"):
            names.add((node.module or "").rpartition(".")[2])
    return names


def test_passes_do_not_import_each_other() -> None:
    passes = {Path(sys.modules[p.run.__module__].__file__ or "").stem for p in PASSES}
    assert len(passes) == len(PASSES)
    for file in FOLDER.glob("*.py"):
        if file.stem != "rewriting":
            assert not imported(file) & (passes | {"rewriting"}), file.name
    assert imported(FOLDER / "rewriting.py") == passes | {"context"}


# The steps of systems/README.md, "Add a rewriting pass".

STEP_1 = '''"""Squares by a product in the place of a power, where that is faster."""

import torch

from systems.scheduling.decision import Decision
from systems.scheduling.graph.part import alone, part
from systems.scheduling.graph.program import Call, Input, Program
from systems.scheduling.graph.rewrite import Replacement, replace

from .context import Context, Rewritten, fastest
from .patterns import shape_of

aten = torch.ops.aten


def square_by_product(program: Program, context: Context) -> Rewritten:
    replacements, decisions = [], []
    for v, call in enumerate(program.calls):
        if call.function is not aten.pow.Tensor_Scalar or call.args[1] != 2:
            continue
        power, x = part(program, [v]), call.args[0]
        square = Call(aten.mul.Tensor, (Input(0), Input(0)), {}, call.produces)
        product = alone("mul", "aten.mul.Tensor", square, power.examples)
        times = {"power": context.cost(power), "product": context.cost(product)}
        decisions.append(Decision("square_by_product", shape_of(program.value(x)), (v,), {**times}, fastest(times)))
        if decisions[-1].chosen == "product":
            square = Call(aten.mul.Tensor, (x, x), {}, call.produces)
            replacements.append(Replacement((v,), "mul", "aten.mul.Tensor", square, {v: None}))
    return replace(program, replacements)[0], decisions
'''
STEP_2 = """    Pass(square_by_product, ("square_by_product",)),\n"""
STEP_3 = "square_by_product: {value} # by a product in the place of a power, measured\n"

USE = """
import json, torch, systems
from torch import nn

class Squares(nn.Module):
    def forward(self, x):
        return (x**2).sin() + x.cos() ** 2

x = torch.randn(4, 64)
prepared = systems.load({system!r}, square_by_product=True).prepare(Squares().eval(), (x,))
assert torch.allclose(prepared(x), Squares()(x), atol=1e-6)
document = prepared.schedule.to_json(model="squares", batch=4, device="cpu")
print(json.dumps(dict(names=[o["name"] for o in document["operators"]], decisions=document["decisions"])))
prepared.close()
"""


@pytest.mark.parametrize("system", ["nimble", "ios"])
@pytest.mark.slow
def test_a_pass_is_added_by_the_steps_of_the_page(system: str, tmp_path: Path) -> None:
    for part in ("conf", "models", "systems"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    passes = tmp_path / "systems" / "scheduling" / "passes"
    (passes / "square_by_product.py").write_text(STEP_1)
    file = passes / "rewriting.py"
    listed = file.read_text().replace("\n)\nSWITCHES", f"\n{STEP_2})\nSWITCHES")
    listed = listed.replace("\n\n\n@dataclass", "\nfrom .square_by_product import square_by_product\n\n\n@dataclass", 1)
    file.write_text(listed)
    for choice, value in (("none", "false"), ("all", "true")):
        with (tmp_path / "conf" / "rewriting" / f"{choice}.yaml").open("a") as switches:
            switches.write(STEP_3.format(value=value))
    environment = os.environ | {"OPWEAVE_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", USE.format(system=system)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    (decision,) = (d for d in answer["decisions"] if d["kind"] != "ios")  # beside the stages of IOS
    assert (decision["kind"], decision["pattern"], decision["count"]) == ("square_by_product", "4x64", 2)
    times = decision["milliseconds"]
    assert set(times) == {"power", "product"} and all(t > 0 for t in times.values())
    assert times[decision["chosen"]] == min(times.values())
    assert answer["names"].count("mul") == (2 if decision["chosen"] == "product" else 0)
