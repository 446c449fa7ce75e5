"""The bundled engine: LoRA training and sampling of transformers models on one device.

It imports only the exceptions from the rest of the package. Its subpackages:

* ``model``: the frozen base model, LoRA adapters, the output head, lookup of models by name;
* ``training``: packing, micro-batches, tree attention, losses, the optimizer and the runs;
* ``sampling``: the scheduler of continuous batching, KV caches, prefill, sampling and scoring;
* ``checkpoints``: the checkpoint store on disk;
* ``kernels``: device-specific kernels (``kernels.cpu`` has kernels in C).

``engine`` is the facade for the clients, and ``worker`` the thread that owns the device.
"""
