"""A server that speaks MCP's messages, written by the specification: lines on stdin and stdout, or
HTTP where a port is given. The argument ``silent`` makes it answer nothing."""

import http.server
import json
import os
import sys
import threading
import time

NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
# Two pages of tools.
PAGES = {
    None: (["double", "fail", "hang"], "2"),
    "2": (["leave", "variable", "picture", "nothing", "garble", "noise", "meet"], None),
}
MEETING = threading.Barrier(2)


def text(said, **more):
    return {"content": [{"type": "text", "text": said}], "isError": False, **more}


def call(name, arguments):
    if name == "double":
        if type(arguments.get("a")) is not int:
            return None  # a JSON-RPC error
        return text(str(2 * arguments["a"]))
    if name == "fail":
        return text("no such page", isError=True)
    if name == "hang":
        time.sleep(30)
    if name == "meet":
        MEETING.wait(10)
        return text("met")
    if name == "leave":
        os._exit(3)
    if name == "garble":
        return {"content": {"kind": "what is this?"}, "isError": "no"}
    if name == "noise":
        print("<html>502</html>", flush=True)
        return text("heard")
    if name == "variable":
        return text(os.environ.get(arguments["name"], "none"))
    if name == "picture":
        blocks = [{"type": "image", "data": "aaaa", "mimeType": "image/png"}]
        inner = {"uri": "file:///a", "text": "of a file", "mimeType": "text/plain"}
        blocks += [{"type": "resource", "resource": inner}, {"type": "text", "text": "é"}]
        return {"content": blocks, "isError": False}
    return {"content": [], "structuredContent": {"rows": [1, "é"]}, "isError": False}


def answer(message):
    """The answer to a message; None to a notification."""
    if "id" not in message:
        return None
    about, parameters = {"jsonrpc": "2.0", "id": message["id"]}, message.get("params") or {}
    method, result = message["method"], None
    if method == "initialize":
        told = {"name": "double", "version": "1"}
        version = parameters["protocolVersion"]
        result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": told}
    elif method == "tools/list":
        names, following = PAGES[parameters.get("cursor")]
        tools = [
            {"name": name, "inputSchema": NUMBERS if name == "double" else {"type": "object"}}
            for name in names
        ]
        tools[0]["description"] = "Twice a number."
        for tool in tools:
            tool["annotations"] = {"readOnlyHint": tool["name"] == "meet"}
        result = {"tools": tools} | ({"nextCursor": following} if following else {})
    elif method == "tools/call":
        result = call(parameters["name"], parameters.get("arguments") or {})
        if result is None:
            return about | {"error": {"code": -32602, "message": "a must be an integer"}}
    if result is None:
        return about | {"error": {"code": -32601, "message": f"no method {method}"}}
    return about | {"result": result}


class Page(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != "Bearer key":
            return self.reply(401, {"error": "who are you?"})
        found = answer(json.loads(body))
        self.reply(202 if found is None else 200, found)

    def do_GET(self):
        self.reply(405, None)

    do_DELETE = do_GET

    def reply(self, status, found):
        body = b"" if found is None else json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *what):
        pass


def main(how):
    if how == "http":
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
        print(server.server_port, flush=True)
        server.serve_forever()
    if how == "silent":
        time.sleep(60)
    for line in sys.stdin:
        found = answer(json.loads(line))
        if found is not None:
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:] or [""])
