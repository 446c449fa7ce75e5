"""The bundled engine: LoRA training and sampling of transformers models on one device.

It knows nothing of the rest of the package but its exceptions. Read it in this order:
``base_model`` (frozen weights and where adapters hook in), ``adapters`` (LoRA tensors),
``packing`` and ``prefix_tree`` (micro-batches), ``head`` (log-probabilities without full logits),
``losses``, ``micro_batch`` (one pass), ``training_run`` (the verbs of one run), ``sampler``,
``store`` (checkpoints), ``engine`` (the worker that owns the device). ``devices``, ``memory`` and
``cpu_attention`` deal with the machine; ``resolve``, ``demo_model`` and ``gguf`` find models.
"""
