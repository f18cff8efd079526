"""Tokenizers and a server that counts with them, for tests of everything that counts tokens."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from locustfiles.corpus import load_corpus
from locustfiles.token_counter import TokenCountError


def words(messages):
    """One token per word; ``<bos>``, a role token and ``<end>`` around each message, ``<assistant>`` last."""
    out = ["<bos>"]
    for message in messages:
        out += [f"<{message['role']}>", *message["content"].split(), "<end>"]
    return [*out, "<assistant>"]


def chatml_lines(messages):
    """The same kind of template on a single string, as byte-level tokenizers see it."""
    text = "".join(f"<|{m['role']}|>\n{m['content']}<|end|>\n" for m in messages)
    return text + "<|assistant|>\n"


def _vocabulary():
    """Pieces of our own corpus of up to seven characters, cut without regard to words and sentences."""
    text = " ".join(
        literal for topic in load_corpus().topics for line in topic.sentences for literal in line.literals
    )
    return {text[start : start + size] for start in range(0, len(text), 5) for size in (2, 3, 5, 7)}


_PIECES = _vocabulary()


def greedy(messages):
    """Longest match over pieces that cross word and sentence boundaries: counts do not add up."""
    text = chatml_lines(messages)
    found = []
    at = 0
    while at < len(text):
        size = next((n for n in (7, 5, 3, 2) if text[at : at + n] in _PIECES), 1)
        found.append(text[at : at + size])
        at += size
    return found


class LocalCounter:
    """Counts without a server."""

    def __init__(self, tokenizer, source="tokenize", ids=True, system=True):
        self.model = tokenizer.__name__
        self.source = source
        self.requests = 0
        self._tokenizer = tokenizer
        self._ids = ids and source == "tokenize"
        self._system = system

    def count_messages(self, messages):
        self.requests += 1
        if not self._system and messages[0]["role"] == "system":
            raise TokenCountError("System role not supported", 400)
        return len(self._tokenizer(messages))

    def count_each(self, prompts):
        return [self.count_messages(messages) for messages in prompts]

    def count_ids(self, messages):
        self.requests += 1
        return [hash(token) for token in self._tokenizer(messages)] if self._ids else None


class TokenServer:
    """What a test wants of the server, and what the server saw.

    ``tokenize``: True, or the HTTP status that /tokenize answers. ``replies``: (status, headers, body) given
    first, whatever the request. ``close_after``: answers after which a connection is closed unsaid.
    """

    def __init__(self, tokenizer=words):
        self.tokenizer = tokenizer
        self.tokenize = True
        self.ids = True
        self.replies = []
        self.close_after = None
        self.url = ""
        self.seen = []  # (path, headers, body)
        self.connections = 0

    def bodies(self, path):
        return [body for seen, _, body in self.seen if seen == path]

    def answer(self, path, body):
        if path == "/tokenize" and self.tokenize is True:
            tokens = self.tokenizer(body["messages"]) if "messages" in body else body["prompt"].split()
            found = {"count": len(tokens), "max_model_len": 1 << 20}
            if self.ids:
                found["tokens"] = [hash(token) for token in tokens]
            return 200, found
        if path == "/tokenize":
            return self.tokenize, {"detail": "Not Found"}
        tokens = self.tokenizer(body["messages"])
        usage = {"prompt_tokens": len(tokens), "completion_tokens": 1}
        return 200, {"choices": [{"message": {"content": "x"}}], "usage": usage}


@contextmanager
def serving(server: TokenServer) -> Iterator[TokenServer]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 65536  # head and body in one segment

        def setup(self):
            super().setup()
            server.connections += 1
            self.answered = 0

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.seen.append((self.path, dict(self.headers), body))
            if server.replies:
                status, headers, data = server.replies.pop(0)
            else:
                status, answer = server.answer(self.path, body)
                headers, data = {}, json.dumps(answer).encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
            self.answered += 1
            if self.answered == server.close_after:
                self.close_connection = True

        def log_message(self, *args):
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request, client_address):
            """A client that went away is what some tests are about."""

    http = Quiet(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
