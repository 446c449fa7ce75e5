"""Sampling by a separate vLLM server process: the engine trains and scores, vLLM samples.

``sampler`` runs requests, ``adapters`` loads adapters, ``client`` is the HTTP client, ``process``
starts a server. ``engine.sampler_settings`` chooses the sampler. vLLM pins other package versions
than this package, so nothing imports it: ``_serve`` runs in the Python of an environment with vLLM.
"""
