"""A vLLM without a model for bench/rollout.py: what the rollout loop loses beside a server of a GPU's speed, measured on a CPU.

    python bench/virtual_server.py PORT [fixed_ms=4] [request_us=18]

Every step takes fixed_ms and request_us for each request that runs (Qwen3-0.6B on an H200: 8.6 ms at 256) and gives each a token; a
request ends after its max_tokens. Replies are those of /inference/v1/generate, log-probs packed as by vllm_scheduler.py.
"""
import asyncio
import json
import sys
import time
from base64 import b64encode
from functools import cache

import numpy as np
from aiohttp import web

METRICS = 'vllm:cache_config_info{kv_cache_size_tokens="10000000"} 1.0\nvllm:kv_cache_usage_perc 0.1\n'


@cache
def reply(tokens: int, top: int) -> bytes:
    rng = np.random.default_rng(0)
    ids, logprobs = np.argsort(rng.random((tokens, 1000)), 1)[:, :top + 1].astype("<i4"), -rng.exponential(1.0, (tokens, top + 1)).astype("<f4")
    packed = dict(count=tokens, ids=b64encode(ids.tobytes()).decode(), logprobs=b64encode(logprobs.tobytes()).decode())
    return json.dumps(dict(choices=[dict(index=0, token_ids=ids[:, 0].tolist(), finish_reason="length")]) | (dict(kv_transfer_params=dict(sampler_logprobs=packed)) if top else {})).encode()


def main(port, fixed_ms="4", request_us="18"):
    fixed, each, joining = float(fixed_ms) / 1e3, float(request_us) / 1e6, []

    async def engine():
        running, due = [], 0.0
        while True:
            running += joining
            joining.clear()
            due = max(due, time.perf_counter() - fixed) + fixed + each * len(running)
            await asyncio.sleep(max(due - time.perf_counter(), 0))
            for request in running:
                request[1] -= 1
                if not request[1]:
                    request[0].set_result(None)
            running = [request for request in running if request[1]]

    async def generate(request):
        sampling = (await request.json())["sampling_params"]
        ended = asyncio.get_running_loop().create_future()
        joining.append([ended, sampling["max_tokens"]])
        await ended
        return web.Response(body=reply(sampling["max_tokens"], (sampling.get("extra_args") or {}).get("sampler_logprobs", 0)), content_type="application/json")

    async def start(app):
        app["engine"] = asyncio.create_task(engine())
    app = web.Application(client_max_size=1 << 24)
    app.on_startup.append(start)
    app.router.add_post("/inference/v1/generate", generate)
    for path, text in {"/health": "", "/reset_prefix_cache": "", "/metrics": METRICS, "/server_info": '{"vllm_config": "vllm_scheduler.scheduler"}'}.items():
        async def answer(request, text=text):
            return web.Response(text=text)
        app.router.add_route("*", path, answer)
    web.run_app(app, host="127.0.0.1", port=int(port), print=None, access_log=None)


if __name__ == "__main__":
    main(sys.argv[1], **dict(argument.split("=") for argument in sys.argv[2:]))
