"""The papers' figures, tables and claims that no preset reproduces, and why; and those that stand under two numbers.

`scripts/reproduce.py --list` names them after those that have a preset. A figure that only explains has nothing to measure.
"""

ILLUSTRATION = "an illustration: it has no figure of a measurement"

# By "paper/exhibit", in the order of the papers.
WITHOUT_PRESET = {
    "nimble/figure1": ILLUSTRATION,
    "nimble/figure3": ILLUSTRATION,
    "nimble/figure4": ILLUSTRATION,
    "nimble/figure5": ILLUSTRATION,
    "nimble/figure6": "a walk through Algorithm 1 on one small graph: tests/test_nimble.py walks it",
    "ios/figure3": ILLUSTRATION,
    "ios/figure4": ILLUSTRATION,
    "ios/figure5": ILLUSTRATION,
    "ios/figure13": "a family of graphs that reach the bound of the search: tests/test_ios_search.py counts them",
    "opara/figure3": "the paper does not say the shapes of its two pairs of operators",
    "opara/figure4": ILLUSTRATION,
    **dict.fromkeys((f"dissertation/figure2.{n}" for n in range(2, 6)), ILLUSTRATION),
    "orca/figure4.1": ILLUSTRATION,
    "orca/figure4.2": ILLUSTRATION,
    "orca/figure4.3": ILLUSTRATION,
    "orca/figure4.4": ILLUSTRATION,
    "orca/figure4.5": ILLUSTRATION,
    "windtunnel/table5.1": "a list of operators: systems/windtunnel/converters has a translation for each that it takes",
    "windtunnel/figure5.1": ILLUSTRATION,
    "windtunnel/figure5.2": ILLUSTRATION,
    "windtunnel/figure5.3": ILLUSTRATION,
}

# The dissertation's chapters 2 and 3, and its appendix, are Nimble's paper: its number -> the paper's.
ALIASES = {
    "dissertation/figure2.1": "nimble/figure1",
    "dissertation/figure3.1": "nimble/figure2a",
    "dissertation/figure3.2": "nimble/figure2b",
    "dissertation/figure3.3": "nimble/figure2c",
    "dissertation/figure3.4": "nimble/figure3",
    "dissertation/figure3.5": "nimble/figure4",
    "dissertation/figure3.6": "nimble/figure5",
    "dissertation/figure3.7": "nimble/figure6",
    "dissertation/figure3.8": "nimble/figure7",
    "dissertation/figure3.9": "nimble/figure8",
    "dissertation/table3.1": "nimble/table1",
    "dissertation/figureA.1": "nimble/supplement_figure1",
    "dissertation/figureA.2": "nimble/supplement_figure2",
}
