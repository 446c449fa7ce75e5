"""Models of the bundled engine or a Tinker server under LiteLLM's interface."""

from tinker_cookbook.third_party.litellm.provider import register_litellm_provider

__all__ = ["register_litellm_provider"]
