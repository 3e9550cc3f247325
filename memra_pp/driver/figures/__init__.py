"""How a pipeline fares, as it tells it: its figures, metrics, traces, and the door where they are asked for."""
