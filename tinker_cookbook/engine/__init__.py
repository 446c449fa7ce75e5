"""The bundled engine: LoRA training and sampling of transformers models on one device.

It imports nothing of the rest of the package but its exceptions. Its packages:

* ``model``: the frozen base model, LoRA adapters, the output head, resolving model names;
* ``training``: packing, micro-batches, tree attention, losses, the optimizer and the runs;
* ``sampling``: the scheduler of continuous batching, KV caches, prefill, sampling and scoring;
* ``checkpoints``: the checkpoint store on disk;
* ``kernels``: device-specific kernels (``kernels.cpu`` has kernels in C).

``engine`` is the facade that the clients call, and ``worker`` the thread that owns the device.
"""
