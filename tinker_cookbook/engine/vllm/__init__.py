"""Sampling by a vLLM server, in a process of its own: the engine trains and scores, vLLM samples.

``sampler`` has the requests and the adapters, ``client`` the HTTP API, ``process`` the server that
is started here, ``settings`` the choice. vLLM needs other versions of packages than this package,
so nothing imports it: ``_serve`` is run by the Python of an environment that has it.
"""
