"""The bundled engine: LoRA training and sampling of transformers models on one device.

It knows nothing of the rest of the package but its exceptions. Read it in this order:
``base_model`` (frozen weights and where adapters hook in), ``adapters`` (LoRA tensors),
``packing`` (micro-batches), ``head`` (log-probabilities without full logits), ``losses``,
``training_run`` (the verbs of one run), ``sampler``, ``store`` (checkpoints), ``engine`` (the
worker that owns the device).
"""
