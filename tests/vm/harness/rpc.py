"""A client of the target's JSON-RPC 2.0 socket (SPDK's method names and parameters)."""

import json
import socket


class RpcError(AssertionError):
    """The target returned an error object; `code` is its error code."""

    def __init__(self, method, error):
        super().__init__(f"{method}: {error.get('message')} ({error.get('code')})")
        self.code = error.get("code")


class Rpc:
    """One connection. Each call waits for its response."""

    def __init__(self, path, timeout=10):
        self.path, self.id, self.buffer = path, 0, ""
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(timeout)
        try:
            self.socket.connect(path)
        except BaseException:
            self.socket.close()
            raise

    def __call__(self, method, **params):
        self.id += 1
        request = {"jsonrpc": "2.0", "id": self.id, "method": method}
        if params:
            request["params"] = params
        self.socket.sendall(json.dumps(request).encode())
        reply = self._reply(method)
        if reply.get("id") != self.id:
            raise AssertionError(f"{method}: the response has id {reply.get('id')}, not {self.id}")
        if "error" in reply:
            raise RpcError(method, reply["error"])
        return reply["result"]

    def _reply(self, method):
        while True:
            text = self.buffer.lstrip()
            try:
                reply, end = json.JSONDecoder().raw_decode(text)
                self.buffer = text[end:]
                return reply
            except json.JSONDecodeError:
                data = self.socket.recv(1 << 16)
                if not data:
                    raise AssertionError(f"{method}: the target closed the RPC connection") from None
                self.buffer += data.decode()

    def close(self):
        self.socket.close()
