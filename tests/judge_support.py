"""A chat server on this machine, whose answers a test writes."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def as_bytes(reply):
    return reply if isinstance(reply, bytes) else json.dumps(reply).encode()


class Server:
    """A chat server whose answers a test writes: `answer(body, number of the request)` gives (status, headers, reply)."""

    def __init__(self, answer):
        self.requests, self.most, self.running, self.lock = [], 0, 0, threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    outer.running += 1
                    outer.most = max(outer.most, outer.running)
                    outer.requests.append((time.monotonic(), self.path, dict(self.headers), body))
                    number = len(outer.requests)
                status, headers, reply = answer(body, number)
                with outer.lock:
                    outer.running -= 1
                parts = reply if isinstance(reply, Iterator) else [as_bytes(reply)]
                try:
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.end_headers()
                    for part in parts:
                        self.wfile.write(part)
                except OSError:  # the client has gone
                    self.close_connection = True

            def log_message(self, *words):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()
