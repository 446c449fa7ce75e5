"""Forecasts of yes-or-no markets, trained by reinforcement learning with Brier's rule."""
