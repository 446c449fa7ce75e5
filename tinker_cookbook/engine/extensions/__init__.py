"""Optional parts of the engine: vLLM, several processes, joint passes, quantised bases, router
replay. The engine loads one only when a setting asks for it."""
