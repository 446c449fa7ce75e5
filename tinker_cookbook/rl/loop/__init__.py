"""The training loop: rollout sources, iterations, optimizer steps; synchronous and asynchronous."""
