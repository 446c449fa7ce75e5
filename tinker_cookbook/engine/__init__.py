"""The bundled engine: LoRA training and sampling of transformers models on one device.

It knows nothing of the rest of the package but its exceptions. Read it in this order:
``base_model`` (frozen weights and where adapters hook in), ``frozen`` (their layouts), ``fused``
(norms, gates and rotary embeddings in one pass), ``adapters`` (LoRA tensors) and ``low_rank`` (how
layers apply them), ``head`` (log-probabilities without full logits). Training: ``packing``,
``prefix_tree`` and ``tree_attention`` (micro-batches), ``losses``, ``micro_batch`` (one pass),
``training_run`` (the verbs of one run), ``store`` (checkpoints). Sampling: ``requests``,
``sampler`` (a snapshot), ``batcher`` and ``batch_plan`` (the running batch), ``kv_cache``,
``paged_cache``, ``prefix_cache`` and ``batch_attention`` (what it keeps and reads), ``draw`` and
``draw_rows`` (tokens), ``one_by_one`` (for models that cannot be batched). ``native`` holds what is
written in C. ``worker`` is the thread that owns the device, ``engine`` what the clients call.
``devices``, ``memory`` and ``cpu_attention`` deal with the machine; ``resolve``, ``demo_model`` and
``gguf`` find models.
"""
