"""A server of the ``mcp`` package, 1.x or 2.x: ``python shop_server.py`` serves stdio."""

import asyncio
import os
import sys

try:
    from mcp.server import MCPServer as Server  # mcp 2
except ImportError:
    from mcp.server.fastmcp import FastMCP as Server

server = Server("shop")
prices = {"tea": 3, "jam": 5}
counted = 0


@server.tool()
def price(item: str, count: int = 1) -> str:
    """Price of an item."""
    return str(prices[item] * count)


@server.tool()
def count() -> str:
    """Number of calls so far, a state of the server."""
    global counted
    counted += 1
    return str(counted)


@server.tool()
def pid() -> str:
    """Process of the server."""
    return str(os.getpid())


@server.tool()
def big() -> str:
    """Ten million characters."""
    return "x" * 10_000_000


@server.tool()
def die() -> str:
    """Ends the process."""
    print("the shop is on fire", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
async def hang() -> str:
    """Does not answer."""
    await asyncio.sleep(60)
    return "late"


if __name__ == "__main__":
    if sys.argv[1:] == ["broken"]:
        sys.exit("no database")
    server.run(*sys.argv[1:])
