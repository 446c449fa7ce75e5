"""Evaluators that training loops call, and evaluations of their own."""
