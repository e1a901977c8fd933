"""HTTP to the vLLM servers: which one serves a group, and how many rollouts they can take."""
import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from contextvars import ContextVar

import aiohttp
import msgspec

from config import Config, ConfigError
from metrics import Window
from replies import parse_completion, parse_generate, parse_metrics
from tools import TurnRecord

RETRY_SECONDS = 25.0     # how long requests are retried while a server answers none
ATTEMPTS = 20            # at one request, while it answers others
PATIENCE_SECONDS = 30.0      # for the first reply of /metrics before rollouts start without
POLL_SECONDS = 5.0       # between two looks at /metrics
FINAL_ONLY = 2           # vLLM's RequestOutputKind: one output a request, not one a token
route: ContextVar[list[int]] = ContextVar("route")       # the server of the group that this task belongs to, in a list of one
arrived: ContextVar[Callable[[], None]] = ContextVar("arrived", default=lambda: None)      # called once a reply of this task's is in, before it is read


class Unreachable(Exception):
    """A request that another attempt may serve: no connection, no whole reply in time, 429 or 5xx."""


class Servers:
    """The servers of a run. All of a group's requests go to one, which then computes its prompt once.

    A server that no longer answers is taken out, and its requests are sent again to another. The trainer puts it back once it has
    given it the current weights: `lost[i]` counts how often this process took server i out, and it is in use while `restored[i]`,
    which the trainer writes, is the same number.
    """

    def __init__(self, config: Config, urls: list[str], lost, restored, version: Callable[[], int], metrics: Window, naming=None):
        self.config, self.urls, self.lost, self.restored, self.version, self.metrics = config, urls, lost, restored, version, metrics
        self.naming = naming or (lambda version: nullcontext(config.model))
        self.requests = [0] * len(urls)                  # in flight
        self.token_endpoint = [True] * len(urls)         # /inference/v1/generate, until it answers 404
        self.packs = [None] * len(urls)                  # whether it has vllm_scheduler.py, once it was asked
        self.answered = [0.0] * len(urls)                # time.monotonic() of the last turn
        self.tells = [False] * len(urls)                 # whether its replies name the version of their tokens

    async def __aenter__(self) -> "Servers":
        self.asking, self.reading = [asyncio.Lock() for _ in self.urls], asyncio.Lock()
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self.config.vllm_server_timeout), connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *error) -> None:
        await self.session.close()

    def in_use(self) -> list[int]:
        return [i for i in range(len(self.urls)) if self.lost[i] == self.restored[i]]

    def choose(self, load: list[int]) -> None:
        """Route this task, and those it starts, to the server with the least load; `load` counts each server's groups."""
        usable = self.in_use() or range(len(self.urls))
        route.set([min(usable, key=lambda i: (load[i], self.requests[i]))])

    async def generate(self, prompt_ids: list[int], sampling: dict) -> TurnRecord:
        """One turn. Retried with back-off until its server has answered nobody for RETRY_SECONDS, each retry counted; a 4xx fails at once."""
        at, failed, delay, attempts = route.get([0]), None, 0.25, 0
        while True:
            server, version, started = at[0], self.version(), time.monotonic()
            if server in self.in_use():
                self.requests[server] += 1
                try:
                    with self.naming(version) as model:
                        turn = await self._while_in_use(server, self._request(server, model, prompt_ids, sampling, version))
                    self.answered[server] = time.monotonic()
                    return turn
                except Unreachable as error:
                    problem = str(error)
                finally:
                    self.requests[server] -= 1
                self.metrics.add("rollout/vllm_retry_count", 1)
                if len(self.in_use()) > 1 and await self._get(server, "/health") is None:
                    self._take_out(server, problem)
            else:
                problem = "no server has the current weights"
            now, attempts = time.monotonic(), attempts + 1
            failed = now if failed is None or now - started > RETRY_SECONDS else failed      # a reply itself may take longer
            hung = attempts >= 3 and now - started > RETRY_SECONDS and self.answered[server] < started       # time-outs, one after the other, and nobody else got a reply
            silent = hung or now + delay > max(failed, self.answered[server]) + RETRY_SECONDS
            if others := [i for i in self.in_use() if i != server]:
                if silent or attempts >= ATTEMPTS:
                    self._take_out(server, problem)
                if server not in self.in_use():
                    at[0] = min(others, key=lambda i: self.requests[i])
                    failed, attempts = None, 0
                    continue
            if silent:
                raise ConfigError(f"the vLLM server at {self.urls[server]} has not answered for {max(RETRY_SECONDS, now - started):.0f} s ({problem}): check that it runs.")
            if attempts >= ATTEMPTS:
                raise ConfigError(f"the vLLM server at {self.urls[server]} answers, but failed one request {ATTEMPTS} times ({problem}): see its log.")
            await asyncio.sleep(delay)
            delay = min(delay * 2, 2.0)

    async def _while_in_use(self, server: int, request) -> TurnRecord:
        """The request's turn; Unreachable once the trainer has taken the server out, which may have left it paused."""
        task = asyncio.ensure_future(request)
        try:
            while not (await asyncio.wait([task], timeout=1.0))[0]:
                if server not in self.in_use():
                    raise Unreachable("it was taken out")
            return task.result()
        finally:
            task.cancel()

    def _take_out(self, server: int, problem: str) -> None:
        if server in self.in_use():
            self.lost[server] += 1
            self.packs[server], self.answered[server] = None, 0.0            # the one that comes back may be another
            print(f"the vLLM server at {self.urls[server]} is taken out ({problem}); it is taken back by the next weight sync that finds it answering.",
                  flush=True)

    async def _request(self, server: int, model: str, prompt_ids: list[int], sampling: dict, version: int) -> TurnRecord:
        try:
            if self.token_endpoint[server]:
                asked = sampling | dict(output_kind=FINAL_ONLY)
                # At a stop string an API process ends the request, without the engine; of several choices one reply has the log-probs of the last.
                packed = sampling.get("logprobs") and not sampling.get("stop") and sampling.get("n", 1) == 1 and await self._packs(server)
                if packed:
                    asked |= dict(logprobs=None, extra_args=(sampling.get("extra_args") or {}) | dict(sampler_logprobs=sampling["logprobs"] - 1))
                reply = await self._post(server, "/inference/v1/generate", dict(model=model, token_ids=prompt_ids, sampling_params=asked))
                if reply is not None:
                    await self._in_turn(server)
                    turn = parse_generate(reply, prompt_ids, version)
                    if turn is None:
                        if packed and self.packs[server]:
                            self.packs[server] = False
                            print(f"warning: the vLLM server at {self.urls[server]} has vllm_scheduler.py but sent no packed log-probs: it is asked for plain ones from now on.", flush=True)
                        raise Unreachable("a reply without log-probs")
                    self._check_told(server, turn)
                    return turn
                self.token_endpoint[server] = False
            asked = {name: value for name, value in sampling.items() if name not in ("detokenize", "extra_args")}
            asked |= dict(model=model, prompt=prompt_ids, return_tokens_as_token_ids=True, return_token_ids=True)      # two ids can share one string
            reply = await self._post(server, "/v1/completions", asked)
            if reply is None:
                raise ConfigError(f"the server at {self.urls[server]} offers neither /inference/v1/generate nor /v1/completions: is it vLLM?")
            await self._in_turn(server)
            return parse_completion(reply, prompt_ids, version)
        except msgspec.DecodeError as error:
            raise Unreachable(f"a broken reply: {error}") from error

    async def _in_turn(self, server: int) -> None:
        """Of replies that came together one is read in each turn of the event loop: the requests that take their places go out first.
        A reply that is then refused is asked for again without a place; a server's first ones keep theirs until one was good."""
        if self.answered[server]:
            arrived.get()()
        async with self.reading:
            await asyncio.sleep(0)

    async def _packs(self, server: int) -> bool:
        """Whether the server sends log-probs packed, one array a reply. Asked once: vLLM runs programs of the system for its first such answers."""
        if self.packs[server] is not None:
            return self.packs[server]
        async with self.asking[server]:
            if self.packs[server] is None:
                try:
                    async with self.session.get(self.urls[server] + "/server_info", params=dict(config_format="json")) as reply:
                        text = await reply.text()
                except (aiohttp.ClientError, asyncio.TimeoutError) as error:
                    raise Unreachable(f"{type(error).__name__}: {error}") from error
                if reply.status >= 500 or reply.status == 429:
                    raise Unreachable(f"{reply.status}: {text[:500]}")
                self.packs[server] = reply.status == 200 and "vllm_scheduler." in text
                if reply.status == 200 and not self.packs[server]:
                    print(f"the vLLM server at {self.urls[server]} writes log-probs out token by token, at about half its speed: start it with python serve.py <this config>.", flush=True)
            return self.packs[server]

    def _check_told(self, server: int, turn: TurnRecord) -> None:
        """A server that told the version of its tokens and does so no more was started anew, with its checkpoint's weights."""
        if self.tells[server] and not turn.version_told:
            problem = "it was started anew and lost the trained weights"
            if len(self.in_use()) == 1 and server in self.in_use():
                raise ConfigError(f"the only vLLM server in use, {self.urls[server]}: {problem}. Start the run again.")
            self._take_out(server, problem)
            raise Unreachable(problem)
        self.tells[server] = self.tells[server] or turn.version_told

    async def _post(self, server: int, path: str, body: dict) -> bytes | None:
        """The reply's body; None where the server has no such path."""
        try:
            async with self.session.post(self.urls[server] + path, json=body) as response:
                content = await response.read()
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise Unreachable(f"{type(error).__name__}: {error}") from error
        if response.status == 200:
            return content
        words = content.decode(errors="replace")[:500]
        if response.status == 404 and "model" not in words:              # else: a model it does not serve
            return None
        if response.status >= 500 or response.status == 429 or (response.status == 404 and len(self.in_use()) > 1):     # 404: it lost the adapter
            raise Unreachable(f"{response.status}: {words}")
        raise ConfigError(f"the vLLM server at {self.urls[server]} refused a request ({response.status}: {words})")

    async def watch(self, cap: "LoadCap", max_model_len: int) -> None:
        """Follow the servers' load with the cap, unless all answer 404 for /metrics at the start; one that is busy leaves the cap as it is."""
        preempted = {}
        while True:
            servers = self.in_use()
            texts = await asyncio.gather(*(self._get(server, "/metrics", absent="") for server in servers))
            loads = {server: parse_metrics(text) for server, text in zip(servers, texts) if text}
            if cap.size is None and (loads or {*texts} == {""}):
                cap.start(sum(load["kv_tokens"] for load in loads.values()) // max_model_len or cap.most)
                if not loads:
                    return
            if loads:
                usage, running, waiting = (f(load[name] for load in loads.values()) for f, name in ((max, "usage"), (sum, "running"), (sum, "waiting")))
                cap.update(usage, waiting)
                self.metrics.add_all({"rollout/vllm_kv_cache_usage_frac": usage, "rollout/vllm_running_requests": running,
                                      "rollout/vllm_queued_requests": waiting})
            for server, load in loads.items():
                self.metrics.add("rollout/vllm_preemption_count", max(load["preempted"] - preempted.get(server, load["preempted"]), 0))
                preempted[server] = load["preempted"]
            await asyncio.sleep(POLL_SECONDS)

    async def _get(self, server: int, path: str, absent: str | None = None) -> str | None:
        """The reply's text, if one comes in time and says 200; `absent` of a 404."""
        try:
            async with self.session.get(self.urls[server] + path, timeout=aiohttp.ClientTimeout(total=5)) as reply:
                return await reply.text() if reply.status == 200 else absent if reply.status == 404 else None
        except (aiohttp.ClientError, asyncio.TimeoutError):
            return None


class LoadCap:
    """How many rollouts may run at once: what fits into the servers' KV cache at full length to begin with, then what their load allows."""

    def __init__(self, most: int):
        self.most, self.size, self.running, self.finished = most, None, 0, 0
        self.known = asyncio.Event()     # whether `size` is, or is waited for no longer
        self.waiting: deque[asyncio.Future] = deque()

    @property
    def limit(self) -> int:
        return self.most if self.size is None else self.size

    def start(self, fitting: int) -> None:
        self.size = min(max(fitting, 1), self.most)
        self.known.set()

    def update(self, usage: float, waiting: float) -> None:
        """Once a poll. It grows only after a cap's worth of rollouts has shown what the cap does, and shrinks only once it is obeyed."""
        if usage > 0.8 and self.running <= self.size:
            self.size = max(int(self.size * 0.7), 1)
        elif usage < 0.6 and waiting == 0 and self.finished >= self.size:
            self.size, self.finished = min(math.ceil(self.size * 1.25), self.most), 0
            self.wake()

    async def ready(self) -> None:
        """Wait until it is known what fits; not for ever, because a server may not tell."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.known.wait(), PATIENCE_SECONDS)
        self.known.set()

    @asynccontextmanager
    async def place(self, left: Callable[[], None] = lambda: None):
        """A rollout's place, for which it waits its turn. Yields what gives it up before the end. `left` is called once it has none, nor waits for one, any more."""
        mine, gone = asyncio.get_running_loop().create_future(), False

        def leave():
            nonlocal gone
            if not gone:
                gone = True
                left()
                if mine.done() and not mine.cancelled():
                    self.running, self.finished = self.running - 1, self.finished + 1
                    self.wake()
        self.waiting.append(mine)
        self.wake()
        try:
            await mine
            yield leave
        finally:
            leave()

    def wake(self) -> None:
        while self.waiting and self.running < self.limit:
            if not (next_ := self.waiting.popleft()).done():
                self.running += 1
                next_.set_result(None)
