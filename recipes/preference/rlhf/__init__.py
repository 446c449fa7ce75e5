"""The three stages of RLHF: ``python -m recipes.preference.rlhf.rlhf_pipeline``."""
