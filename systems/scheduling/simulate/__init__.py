"""How long a schedule takes, predicted without a GPU."""
