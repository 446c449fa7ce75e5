"""Forecasts of yes-or-no markets, trained by RL with the Brier score as the reward."""
