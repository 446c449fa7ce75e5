"""One step of direct preference optimisation compared with TRL's DPOTrainer, in one run."""
