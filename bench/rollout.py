"""Tokens a second through the rollout loop, beside a bare load generator that sends the same requests and parses nothing.

    python bench/rollout.py configs/x.py [groups=8] [repeats=3] [levers=true] [api_servers=1] [server=virtual] [any option of the config=value …]

Starts the config's server unless one answers. Each repeat runs the whole loop (generation, parsing, scoring, samples pickled into a
queue that another process empties), then replays its very requests with a plain HTTP client, then once more without log-probs: what
they cost the server. A replay opens its connections at the times at which the loop opened its own: they decide how requests spread over
the server's processes, and whether replies of one length end all at once. Tokens/s are from the first request to the last reply; what the
loop then still has to read and score is its tail, which a run that goes on does while the server works. One JSON object a line; the last
holds medians. CPU is that of the loop's process alone. levers=true replays them also as they would be without what makes them cheap (the
same seeds, so as good as the same tokens); api_servers changes the server's processes.
server=virtual: beside virtual_server.py, which takes a GPU's time for a step; only the loop over the bare client means something then.
"""
import asyncio
import gc
import json
import multiprocessing
import statistics
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlparse

import aiohttp
import requests

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import client  # noqa: E402
import serve  # noqa: E402
from config import load_config  # noqa: E402
from data import load_rows  # noqa: E402
from model import eos_token_ids, load_tokenizer  # noqa: E402
from rollout import AsyncRolloutLoop, Shared, _leave  # noqa: E402
from serve import Server, answers, check_server, wait_for_server  # noqa: E402


def drain(samples, metrics):
    while samples.get() is not None:
        while not metrics.empty():
            metrics.get()


class Loop(AsyncRolloutLoop):
    """The loop, counting its tokens."""

    tokens = 0

    def _record_rollouts(self, rollouts, sequences):
        super()._record_rollouts(rollouts, sequences)
        self.tokens += sum(len(rollout.completion_ids) for rollout in rollouts)


def through_the_loop(config, rows, tokenizer, max_model_len):
    """What was measured, and [(seconds since the first request, URL, body) of each]"""
    shared, sent, replied = Shared.create(len(config.server_urls)), [], []
    shared.allowance.value = 1 << 60
    drainer = multiprocessing.get_context("spawn").Process(target=drain, args=(shared.samples, shared.metrics), daemon=True)
    drainer.start()
    loop = Loop(config, rows, tokenizer, eos_token_ids(config, tokenizer), max_model_len, shared)
    post = client.Servers._post

    async def recording(self, server, path, body):
        sent.append((time.perf_counter(), self.urls[server] + path, body))
        try:
            return await post(self, server, path, body)
        finally:
            replied.append(time.perf_counter())
    client.Servers._post = recording
    loop._may_start = lambda: loop.generating < loop.cap.limit           # the server's speed, not that of the first group, which runs alone
    asyncio.run(meet(loop.servers))
    gc.collect()
    gc.freeze()                                                          # as the rollout process does
    cpu = time.process_time()
    asyncio.run(loop.run())
    cpu, tail = time.process_time() - cpu, time.perf_counter() - max(replied)
    client.Servers._post = post
    gc.unfreeze()
    drainer.join()
    _leave(shared, at_once=True)                                         # metrics that nobody reads would keep this process from ending
    seconds = max(replied) - sent[0][0]
    return (dict(tokens=loop.tokens, seconds=seconds, tail=tail, cpu=cpu, in_flight=(sum(replied) - sum(at for at, _, _ in sent)) / seconds),
            [(at - sent[0][0], url, body) for at, url, body in sent])


async def meet(servers):
    """What the loop asks a server once in a run; a server's first answer takes seconds."""
    async with servers:
        await servers._packs(0)
    servers.answered[0] = time.monotonic()


async def replay(bodies, concurrency):
    """(seconds for the same requests with nothing parsed, mean bytes of a reply, mean number of requests in flight)"""
    slots = asyncio.Semaphore(concurrency)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)) as session:
        async def send(number, at, url, body):
            async with slots:
                if number < concurrency:
                    await asyncio.sleep(started + at - time.perf_counter())
                begun = time.perf_counter()
                async with session.post(url, json=body) as reply:
                    size.append(len(await reply.read()))
                latency.append(time.perf_counter() - begun)
        size: list[int] = []
        latency: list[float] = []
        started = time.perf_counter()
        await asyncio.gather(*(send(number, *request) for number, request in enumerate(bodies)))
        seconds = time.perf_counter() - started
        return seconds, statistics.mean(size), sum(latency) / seconds


def changed(bodies, **changes):
    return [(at, url, body | (dict(sampling_params=body["sampling_params"] | changes) if "sampling_params" in body else changes)) for at, url, body in bodies]


def without_logprobs(bodies):
    return changed(bodies, logprobs=None, **(dict(extra_args=None) if "sampling_params" in bodies[0][2] else {}))


def unpacked(bodies, config):
    """As a server without vllm_scheduler.py is asked."""
    return changed(bodies, logprobs=config.num_sampler_logprobs + 1, extra_args=None)


def as_completions(bodies, **changes):
    return [(at, url.replace("/inference/v1/generate", "/v1/completions"),
             {name: value for name, value in body["sampling_params"].items() if name not in ("detokenize", "extra_args", "output_kind")}
             | dict(model=body["model"], prompt=body["token_ids"], return_tokens_as_token_ids=True, return_token_ids=True) | changes) for at, url, body in bodies]


def set_api_servers(processes):
    command = serve.server_command

    def with_processes(config):
        argv, extra = command(config)
        at = argv.index("--api-server-count") + 1
        return [*argv[:at], processes, *argv[at + 1:]], extra
    serve.server_command = with_processes


def main(argv):
    own = dict(argument.split("=") for argument in argv[1:] if argument.split("=")[0] in ("groups", "repeats", "levers", "api_servers", "server"))
    rest = [argument for argument in argv[1:] if argument.split("=")[0] not in own]
    groups, repeats = int(own.get("groups", 8)), int(own.get("repeats", 3))
    config = load_config([argv[0], *rest, "launch_server=false"])
    rows = load_rows(config.train_dataset, config.train_split)
    config = load_config([argv[0], *rest, "launch_server=false", "max_steps=-1", f"num_train_epochs={groups / len(rows)}"])
    Path(config.output_dir).mkdir(parents=True, exist_ok=True)
    if "api_servers" in own:
        set_api_servers(own["api_servers"])
    url, virtual = config.server_urls[0], own.get("server") == "virtual"
    if virtual and (answers(url) or not config.vllm_max_model_length):
        sys.exit(f"server=virtual needs vllm_max_model_length, and an address where nothing answers: {url}, vllm_server_base_url sets it.")
    server = subprocess.Popen([sys.executable, Path(__file__).with_name("virtual_server.py"), str(urlparse(url).port)]) if virtual else None if answers(url) else Server(config)
    try:
        while virtual and not answers(url) and server.poll() is None:
            time.sleep(0.1)
        if not virtual:
            wait_for_server(config, server)
        bodies, tokens = run(config, rows, repeats, config.vllm_max_model_length if virtual else check_server(config, url))
        if own.get("levers") == "true":
            levers(config, bodies, tokens)
    finally:
        if server:
            server.terminate() if virtual else server.stop()


def run(config, rows, repeats, max_model_len):
    tokenizer, lines = load_tokenizer(config), []
    for repeat in range(repeats + 1):                                    # the first warms the server up
        def fresh():
            requests.post(config.server_urls[0] + "/reset_prefix_cache", timeout=60)
        fresh()
        loop, bodies = through_the_loop(config, rows, tokenizer, max_model_len)
        fresh()
        bare, size, in_flight = asyncio.run(replay(bodies, config.max_concurrent_rollouts))
        fresh()
        silent, _, _ = asyncio.run(replay(without_logprobs(bodies), config.max_concurrent_rollouts))
        tokens, seconds = loop["tokens"], loop["seconds"]
        line = dict(bench="rollout", requests=len(bodies), tokens=tokens, loop_tokens_per_s=tokens / seconds, bare_tokens_per_s=tokens / bare,
                    no_logprobs_tokens_per_s=tokens / silent, over_bare_ratio=bare / seconds, with_tail_ratio=bare / (seconds + loop["tail"]), loop_tail_s=loop["tail"],
                    logprobs_ratio=silent / bare, loop_in_flight=loop["in_flight"], bare_in_flight=in_flight, loop_cpu_ratio=loop["cpu"] / (seconds + loop["tail"]),
                    loop_cpu_us_per_token=1e6 * loop["cpu"] / tokens, reply_kb=size / 1e3)
        print(json.dumps({key: round(value, 3) if isinstance(value, float) else value for key, value in line.items()}), flush=True)
        lines += [line] if repeat else []
    medians = {key: statistics.median(line[key] for line in lines) for key in lines[0] if not isinstance(lines[0][key], (str, int))}
    print(json.dumps(dict(bench="rollout_median", repeats=repeats, **{key: round(value, 3) for key, value in medians.items()})), flush=True)
    return bodies, tokens


def levers(config, bodies, tokens):
    variants = {"no log-probs": without_logprobs(bodies), "as the loop asks": bodies}
    if bodies[0][1].endswith("/inference/v1/generate"):
        objects = unpacked(bodies, config)
        variants |= {"not packed": objects, "not packed, an output a token": changed(objects, output_kind=0), "and text": changed(objects, output_kind=0, detokenize=True),
                     "/v1/completions": as_completions(objects), "/v1/completions without log-probs": as_completions(objects, logprobs=None)}
    for name, these in variants.items():
        requests.post(config.server_urls[0] + "/reset_prefix_cache", timeout=60)
        seconds, size, _ = asyncio.run(replay(these, config.max_concurrent_rollouts))
        print(json.dumps(dict(bench="rollout_lever", lever=name, tokens_per_s=round(tokens / seconds), reply_kb=round(size / 1e3, 1))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
