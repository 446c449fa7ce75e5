"""A proxy that records what programs sample through the Anthropic and OpenAI chat APIs."""

from tinker_cookbook.capture.proxy.address import ADDRESS_KEY_MAP, parse_address
from tinker_cookbook.utils.imports import missing_extra

try:
    from tinker_cookbook.capture.proxy.app import ProxyDeps, make_app
except ModuleNotFoundError as error:
    raise missing_extra("recordings through the proxy", error, "capture") from error

__all__ = ["ADDRESS_KEY_MAP", "ProxyDeps", "make_app", "parse_address"]
