"""The chat page of the server; the slow test drives it in a headless Chromium (about 20 s)."""

from __future__ import annotations

import json

import httpx
import pytest
from browser import Browser, find_chromium

from tinker_cookbook.server import page
from tinker_cookbook.supervised.conversation_file import read_conversations

# Puts the same picture twice into what the page takes from the clipboard.
PASTE = """
const canvas = document.createElement("canvas");
canvas.toBlob((blob) => {
  const transfer = new DataTransfer();
  for (const name of ["a.png", "b.png"]) {
    transfer.items.add(new File([blob], name, { type: "image/png" }));
  }
  document.dispatchEvent(new ClipboardEvent("paste", { clipboardData: transfer }));
}), 1
"""
PARAMETERS = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 60, "seed": 5}


def test_the_page_needs_no_key_and_allows_no_foreign_code(oai_serving):
    assert f"chat page    {oai_serving.url}/" in oai_serving.said
    size = 0
    for path in page.FILES:
        answer = httpx.get(oai_serving.url + path)
        assert answer.status_code == 200, path
        policy = dict(
            part.strip().split(" ", 1)
            for part in answer.headers["content-security-policy"].split(";")
        )
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["connect-src"] == "'self'"
        assert "unsafe" not in answer.headers["content-security-policy"]
        size += len(answer.content)
        assert httpx.post(oai_serving.url + path).status_code == 405
    assert size < 30_000
    # Only these: the data behind the page still needs the key.
    assert httpx.get(f"{oai_serving.url}/oai/api/v1/models").status_code == 401
    assert httpx.get(f"{oai_serving.url}/chat.json").status_code == 401
    assert "://" not in httpx.get(oai_serving.url).text
    script = httpx.get(f"{oai_serving.url}/chat.js").text
    for name in ("innerHTML", "outerHTML", "insertAdjacentHTML", "eval(", "document.write"):
        assert name not in script


@pytest.fixture
def browser(tmp_path):
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    running = Browser(program, tmp_path / "profile")
    yield running
    running.close()


def check_html_stays_text(browser):
    """HTML of a user or model stays text; fenced code has a fixed width."""
    evil = "<img src=x onerror=alert(1)>\n```html\n<b>x</b>\n```\n`<i>`"
    answer = {"model": "<b>m</b>", "text": evil, "thinking": evil, "calls": "", "tokens": []}
    turn = {
        "user": evil,
        "images": [],
        "answers": [{**answer, "mark": "", "error": "", "done": True}, None],
    }
    browser.run(f"turns = [{json.dumps(turn)}], drawAll(), 1")
    elements = "document.querySelectorAll('#chat img, #chat b, #chat i, #chat script')"
    assert browser.run(f"{elements}.length") == 0
    assert browser.run("document.querySelector('.user').textContent") == evil
    assert browser.run("document.querySelector('.text pre code').textContent") == "<b>x</b>"
    assert "onerror" in browser.run("document.querySelector('.text').textContent")


@pytest.mark.slow
def test_chat_page(browser, oai_serving, oai, stories_model, scripted_model, tmp_path):
    done = "document.querySelector('#send').textContent == 'Send'"
    answers = "[...document.querySelectorAll('.turn:last-child .answer')]"

    def send(text):
        browser.fill("#message", text)
        browser.press("Enter")

    # Without a key, and with a wrong one, the page says so.
    browser.size(1200, 800)
    browser.open(f"{oai_serving.url}/")
    browser.wait("document.querySelector('#notice').textContent.includes('API key')")
    browser.fill("#key", "tml-wrong")
    browser.wait("document.querySelector('#notice').textContent.includes('not one of this server')")
    assert len(browser.problems) == 1  # the 401, which Chromium logs
    browser.problems.clear()
    browser.fill("#key", oai_serving.key())
    names = browser.wait("[...document.querySelectorAll('#model-0 option')].map(o => o.text)")
    assert "stories260k" in names
    assert browser.run("sessionStorage.getItem('key')") == oai_serving.key()
    assert browser.run("localStorage.length") == 0

    # The answer is that of the API for the same messages.
    browser.fill("#model-0", stories_model)
    browser.fill("#system", "Tell stories.")
    for name, value in PARAMETERS.items():
        browser.fill(f"#{name}", str(value))
    send("Once upon a time")
    browser.wait(done)
    messages = [
        {"role": "system", "content": "Tell stories."},
        {"role": "user", "content": "Once upon a time"},
    ]
    expected = oai.chat.completions.create(model=stories_model, messages=messages, **PARAMETERS)
    text = expected.choices[0].message.content
    assert browser.run(f"{answers}[0].querySelector('.text').textContent") == text
    assert "[cut at max_tokens=60]" in browser.run(f"{answers}[0].innerText")
    # Colours show while the pointer is on the answer; the spans spell the text.
    assert browser.run(f"[...{answers}[0].querySelectorAll('.text span')].map(s => s.textContent)"
                       ".join('')") == text  # fmt: skip
    style = "getComputedStyle(document.querySelector('.text span')).backgroundColor"
    assert browser.run(style) == "rgba(0, 0, 0, 0)"
    browser.hover(".answer .text")
    assert browser.run(style) != "rgba(0, 0, 0, 0)"

    # The second turn has the first in its prompt.
    send("And then?")
    browser.wait(done)
    assert browser.run("messagesOf(0).map(m => m.role).join()") == (
        "system,user,assistant,user,assistant"
    )

    # Text arrives in pieces, and Stop or Escape keeps what has come.
    browser.fill("#max_tokens", "480")
    some = f"{answers}.length && {answers}[0].querySelector('.text').textContent.length > 9"
    for stop in (
        lambda: browser.run("document.querySelector('#send').click(), 1"),
        lambda: browser.press("Escape"),
    ):
        browser.run("document.querySelector('#new').click(), 1")
        send("Once upon a time")
        browser.wait(some)
        stop()
        browser.wait(done)
        assert "[stopped]" in browser.run(f"{answers}[0].innerText")
    browser.fill("#max_tokens", "30")

    # Two models side by side; each row of the file is the conversation of one.
    browser.run("document.querySelector('#new').click(), 1")
    browser.fill("#model-1", scripted_model)
    send("Once upon a time")
    browser.wait(f"{done} && {answers}.length == 2")
    boxes = browser.run(f"{answers}.map(a => a.getBoundingClientRect().x)")
    assert boxes[0] < boxes[1]
    file = tmp_path / "chat.jsonl"
    file.write_text(browser.run("rows()"))
    saved = read_conversations(file)
    assert [m["role"] for m in saved[0]] == ["system", "user", "assistant"]
    models = [json.loads(line)["model"] for line in file.read_text().splitlines()]
    assert models == [stories_model, scripted_model]

    # An error of the server is shown, and the next message is sent without the failed one.
    browser.fill("#temperature", "-1")
    send("Fail")
    browser.wait(f"{done} && {answers}.every(a => a.querySelector('.error'))")
    assert "temperature" in browser.run(f"{answers}[0].innerText")
    assert browser.run("messagesOf(0).length") == 3
    browser.problems.clear()  # both 400s

    check_html_stays_text(browser)

    # A pasted or dropped image is shown, removed on demand, and sent before the text.
    browser.run("document.querySelector('#new').click(), 1")
    browser.run(PASTE)
    browser.wait("document.querySelectorAll('#images img').length == 2")
    browser.run("document.querySelector('#images button').click(), 1")
    browser.run("document.querySelector('#chat').scrollTop, 1")
    send("What is it?")
    browser.wait(f"{done} && document.querySelectorAll('.user img').length == 1")
    assert browser.run("document.querySelectorAll('#images img').length") == 0
    kinds = "contentOf(turns[0]).map(p => p.type + (p.image_url || {url: ''}).url.slice(0, 22))"
    assert browser.run(kinds) == ["image_urldata:image/png;base64,", "text"]
    browser.problems.clear()  # the story model takes no images

    assert browser.problems == []
