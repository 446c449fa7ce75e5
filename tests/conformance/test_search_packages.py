"""The search recipe with a Chroma server: about 15 s, and a download of 100 MB the first time."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path

import pytest
from environments import python_with, run_in

pytestmark = [pytest.mark.slow, pytest.mark.shared]


SEARCH_IN_CHROMA = """
import asyncio, sys
from types import SimpleNamespace as Box
import chromadb
from recipes.search_tool.corpus import read_corpus
from recipes.search_tool.questions import EXAMPLE_DOCUMENTS
from recipes.search_tool.tools import ChromaTool, RetrievalConfig
from tinker_cookbook.exceptions import BackendError
from tinker_cookbook.tool_use import ToolInput

class Words:
    # In place of Gemini: which titles a text has.
    def __getattr__(self, name):
        return self

    async def embed_content(self, model, contents, config):
        return Box(embeddings=[Box(values=vector(text)) for text in contents])

def vector(text):
    return [float(title in text) for title in titles]

port = int(sys.argv[1])
documents = read_corpus(str(EXAMPLE_DOCUMENTS))
titles = [d.title for d in documents]
collection = chromadb.HttpClient(port=port).create_collection("places")
collection.add(ids=titles, documents=[d.text for d in documents],
               embeddings=[vector(d.text) for d in documents])
config = RetrievalConfig(n_results=2)

async def main():
    tool = await ChromaTool.build("localhost", port, "places", config, gemini_client=Words())
    result = await tool.search.run(ToolInput({"query_list": ["Who is the mayor of Saltash?"]}))
    print(result.messages[0]["content"])
    for name, at in (("nothing", port), ("places", 1)):
        try:
            await ChromaTool.build("localhost", at, name, config, gemini_client=Words())
        except BackendError as error:
            print("refused:", error)

asyncio.run(main())
"""


def test_the_original_tool_on_a_real_chroma_server(tmp_path: Path):
    """Costs about 15 s."""
    python = python_with("search-chroma")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Not by its first line, which names the folder in which the environment was made.
    chroma = python.with_name("chroma")
    server = subprocess.Popen(
        [str(python), str(chroma), "run", "--path", str(tmp_path / "data"), "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert server.poll() is None, "the server ended"
            assert time.monotonic() < deadline
            time.sleep(0.2)
        printed = run_in(python, "-c", SEARCH_IN_CHROMA, str(port))
    finally:
        server.terminate()
        server.wait(timeout=20)
    assert printed.startswith("Query: Who is the mayor of Saltash?\nDocument 1:\n")
    assert "Saltash" in printed.splitlines()[2]
    assert f"'nothing' of a Chroma server at localhost:{port} cannot be opened" in printed
    assert "'places' of a Chroma server at localhost:1 cannot be opened" in printed
