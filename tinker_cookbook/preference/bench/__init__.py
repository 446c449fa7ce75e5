"""One step of direct preference optimisation here beside one of TRL's DPOTrainer, in one run."""
