"""IOS: the inter-operator scheduler (Ding et al., MLSys 2021)."""
