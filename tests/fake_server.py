"""The endpoints of a vLLM server that rollouts use, on a thread of its own, with a fault for any request number."""
import asyncio
import threading
from base64 import b64encode

import numpy as np
from aiohttp import web

EOS = 0


def choice(ids, logprobs=None, asked=3, versions=(), **more):
    """A reply's choice: the sampled token is its position's most likely one, its successors in the vocabulary follow."""
    logprobs = [-0.5] * len(ids) if logprobs is None else logprobs
    content = [dict(token_id=i, logprob=value,
                    top_logprobs=[dict(token_id=i + j, logprob=(value or 0) - j, rank=1 + j) for j in range(asked)])
               for i, value in zip(ids, logprobs)]
    told = [dict(version=str(version), start=n, end=n + 1) for n, version in enumerate(versions)]
    return dict(index=0, token_ids=ids, logprobs=dict(content=content), weight_versions=told,
                finish_reason="stop" if ids[-1:] == [EOS] else "length") | more


def by_seed(body):
    """Three tokens that differ between five requests in a row."""
    n, sampling = body["sampling_params"]["seed"] % 5, body["sampling_params"]
    return choice([20 + n, 30 + n, EOS], [-0.5, -1.0, -1.5], sampling["logprobs"] or 1 + sampling["extra_args"]["sampler_logprobs"])


def as_completion(made):
    """The same choice as /v1/completions writes it."""
    content = made["logprobs"]["content"]
    return dict(index=0, token_ids=made["token_ids"], finish_reason=made["finish_reason"], logprobs=dict(
        tokens=[f"token_id:{entry['token_id']}" for entry in content], token_logprobs=[entry["logprob"] for entry in content],
        top_logprobs=[{f"token_id:{top['token_id']}": top["logprob"] for top in entry["top_logprobs"]} for entry in content]))


def packed(made):
    """The reply with this choice that vllm_scheduler.py makes of it."""
    rows = [[(entry["token_id"], entry["logprob"]), *((top["token_id"], top["logprob"]) for top in entry["top_logprobs"][:-1])] for entry in made["logprobs"]["content"]]
    ids, logprobs = (b64encode(np.array([[pair[i] for pair in row] for row in rows], kind)).decode() for i, kind in ((0, "<i4"), (1, "<f4")))
    return dict(choices=[made | dict(logprobs=None)], kv_transfer_params=dict(sampler_logprobs=dict(count=len(rows), ids=ids, logprobs=logprobs)))


class FakeServer:
    """`with FakeServer() as server:` listens at `server.url` and answers POST /inference/v1/generate with `answer(body)`.

    `faults[n]` is what befalls request n, counted from 0: (status, text), "close", "malformed", or a list [seconds of delay, one of
    those or None]. `bodies` are the requests and `events` ("in" or "out", prompt ids), both in order of time. While `down` every connection
    is cut. `metrics` is the text of /metrics. Without the token endpoint it answers POST /v1/completions, ids as text. A chat completion
    is `chat(body)`. `info` is the text of /server_info: one that names the scheduler has it.
    """

    def __init__(self, answer=by_seed, faults=None, delay=0.0, token_endpoint=True, metrics=None, info=None):
        self.answer, self.faults, self.delay, self.token_endpoint, self.metrics, self.info, self.down = answer, faults or {}, delay, token_endpoint, metrics, info, False
        self.bodies: list[dict] = []
        self.events: list[tuple[str, tuple[int, ...]]] = []

    def most_active(self) -> int:
        active = [0]
        for kind, _ in self.events:
            active.append(active[-1] + (1 if kind == "in" else -1))
        return max(active)

    def seeds(self) -> list[int]:
        return [body["sampling_params"]["seed"] for body in self.bodies]

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        fault = self.faults.get(len(self.bodies))
        self.bodies.append(body)
        prompt = tuple(body["token_ids"] if "token_ids" in body else body["prompt"])
        self.events.append(("in", prompt))
        try:
            delay, fault = fault if isinstance(fault, list) else (self.delay, fault)
            await asyncio.sleep(delay)
            if fault == "close" or self.down:
                request.transport.abort()
                return web.Response()
            if fault == "malformed":
                return web.Response(text='{"choices": [')
            if fault:
                return web.Response(status=fault[0], text=fault[1])
            if self.token_endpoint and "vllm_scheduler.scheduler" in (self.info or "") and "sampler_logprobs" in (body["sampling_params"].get("extra_args") or {}):
                return web.json_response(packed(self.answer(body)))
            if self.token_endpoint:
                return web.json_response(dict(choices=[self.answer(body)]))
            return web.json_response(dict(choices=[as_completion(self.answer(dict(token_ids=body["prompt"], sampling_params=body)))]))
        finally:
            self.events.append(("out", prompt))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        return web.json_response(self.chat(self.bodies[-1]))

    async def _get(self, request: web.Request) -> web.StreamResponse:
        if self.down:
            request.transport.abort()
        text = {"/metrics": self.metrics, "/server_info": self.info}.get(request.path, "")
        return web.Response(text=text or "", status=404 if text is None else 200)

    async def _start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/inference/v1/generate" if self.token_endpoint else "/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/health", self._get)
        app.router.add_get("/metrics", self._get)
        app.router.add_get("/server_info", self._get)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    def __enter__(self) -> "FakeServer":
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.runner = asyncio.run_coroutine_threadsafe(self._start(), self.loop).result(60)
        return self

    def __exit__(self, *_) -> None:
        asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop).result(60)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(60)
        self.loop.close()
