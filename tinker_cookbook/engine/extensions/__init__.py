"""Optional parts of the engine: vLLM, several processes, joint passes, quantised bases, router
replay. The engine loads them only by ``engine.extension``, when a setting asks for one."""
