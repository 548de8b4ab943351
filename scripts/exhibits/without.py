"""The papers' figures, tables and claims that no preset reproduces, and why.

`scripts/reproduce.py --list` names them after those that have one. A figure that only explains has nothing to measure.
"""

ILLUSTRATION = "an illustration: it has no figure of a measurement"

# By "paper/exhibit", in the order of the papers. The dissertation's chapters 2 and 3 are Nimble's paper.
WITHOUT_PRESET = {
    "nimble/figure1": ILLUSTRATION,
    "nimble/figure3": ILLUSTRATION,
    "nimble/figure4": ILLUSTRATION,
    "nimble/figure5": ILLUSTRATION,
    "nimble/figure6": "a walk through Algorithm 1 on one small graph: tests/test_nimble.py walks it",
    "ios/figure1": "operations a convolution over the years, without a system: no record counts a network's convolutions",
    "ios/figure2": "its sample network is no entry of the zoo; model=custom takes it",
    "ios/figure3": ILLUSTRATION,
    "ios/figure4": ILLUSTRATION,
    "ios/figure5": ILLUSTRATION,
    "ios/figure10": "it is of the last block of Inception-v3 alone, which is no entry of the zoo; ios/specialization is of "
    "the whole network",
    "ios/figure13": "a family of graphs that reach the bound of the search: tests/test_ios_search.py counts them",
    "opara/figure3": "the paper does not say the shapes of its two pairs of operators",
    "opara/figure4": ILLUSTRATION,
    **dict.fromkeys((f"dissertation/figure2.{n}" for n in range(1, 6)), ILLUSTRATION),
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
