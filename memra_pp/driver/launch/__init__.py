"""From a model and a number of stages to processes that are ready, and what cleans up behind them."""
