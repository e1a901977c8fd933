"""A vLLM server as far as a weight transfer goes, gloo in place of NCCL; written from vLLM's protocol, apart from transport.py.

    nccl_server.py PORT VERSION FOLDER      each finished update is saved as FOLDER/<weight version>.pt; /fail {"path": …, "status": …} makes a path fail once
"""
import json
import sys
import threading
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
import torch.distributed as dist

STATE = dict(group=None, packing=None, active=False, received={}, fail={}, calls=[], paused=False, version=None)


def receive(info):
    """Chunks: a tensor is added until the bytes exceed the buffer's size; then they travel as one uint8 tensor."""
    packing = STATE["packing"] if VERSION >= (0, 28) else info
    assert packing["packed"] and len(info["names"]) == len(info["dtype_names"]) == len(info["shapes"])
    waiting, size = [], 0

    def flush():
        data = torch.empty(size, dtype=torch.uint8)
        STATE["group"].broadcast(data, 0).wait()
        at = 0
        for name, dtype, shape, n in waiting:
            STATE["received"][name] = data[at:at + n].clone().view(dtype).view(shape)
            at += n
    for name, dtype_name, shape in zip(info["names"], info["dtype_names"], info["shapes"]):
        dtype = getattr(torch, dtype_name)
        n = torch.Size(shape).numel() * dtype.itemsize
        waiting.append((name, dtype, shape, n))
        size += n
        if size > packing["packed_buffer_size_bytes"]:
            flush()
            waiting, size = [], 0
    if waiting:
        flush()


def act(path, body):
    assert path != "/collective_rpc", f"'Worker' object has no attribute '{body.get('method')}'"      # its workers are vLLM's own
    if path == "/init_weight_transfer_engine":
        info = body["init_info"]
        assert ("packed" in info) == (VERSION >= (0, 28)), "vLLM 0.28 moved the packing from each update to the connection"
        store = dist.TCPStore(info["master_address"], info["master_port"], info["world_size"], False, timedelta(seconds=60))
        STATE["group"] = dist.ProcessGroupGloo(store, info["rank_offset"], info["world_size"], timedelta(seconds=60))
        STATE["packing"] = info
    elif path == "/start_weight_update":
        assert not STATE["active"], "start_weight_update called while a weight update is already active"
        STATE.update(active=True, received={})
    elif path == "/update_weights":
        assert STATE["active"]
        receive(body["update_info"])
    elif path == "/finish_weight_update":
        assert STATE["active"]
        STATE["active"] = False
        torch.save(STATE["received"], f"{sys.argv[3]}/{body.get('weight_version')}.pt")


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self.reply(200, {"/get_world_size": dict(world_size=1), "/version": dict(version=sys.argv[2]), "/calls": STATE["calls"], "/server_info": dict(vllm_config={}),
                         "/weight_info": dict(weight_version=STATE["version"])}.get(self.path.partition("?")[0], {}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        path = self.path.partition("?")[0]
        if path == "/fail":
            STATE["fail"][body["path"]] = True
            return self.reply(200, {})
        STATE["calls"].append(path)
        STATE["version"] = body["new_version"] if path == "/update_weight_version" else STATE["version"]
        if STATE["fail"].pop(path, False):
            return self.reply(500, dict(error="no memory left"))
        try:
            act(path, body)
        except Exception as error:
            return self.reply(500, dict(error=f"{type(error).__name__}: {error}"))
        self.reply(200, {})

    def reply(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


if __name__ == "__main__":
    VERSION = tuple(map(int, sys.argv[2].split(".")[:2]))
    torch.set_num_threads(1)
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    threading.Thread(target=lambda: (sys.stdin.read(), server.shutdown()), daemon=True).start()      # ends with the test
    server.serve_forever()
