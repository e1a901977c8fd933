"""The exact `vllm serve` command a config needs, so that no flag can disagree with the trainer.

    python serve.py configs/x.py [key=value …]            run it
    python serve.py configs/x.py [key=value …] --print    print it

With launch_server=True train.py starts, watches and stops the same command itself.
"""
import ctypes
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import requests
import torch

from config import Config, ConfigError, load_config
from flags import server_command
from model import compute_dtype, device_type

RESTART = "restart it with: python serve.py <this config>"
OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")      # and TORCHELASTIC_…: told they are, a server waits for torchrun's store


class Server:
    """A vLLM server this process owns; it dies with the process, however that dies. Its output goes to output_dir/vllm.log."""
    def __init__(self, config: Config):
        argv, extra = server_command(config)
        if answers(config.server_urls[0]):
            raise ConfigError(f"launch_server=True, but something already answers at {config.server_urls[0]}: stop it, or set launch_server=False to use it.")
        self.log = Path(config.output_dir) / "vllm.log"
        ours = {name: value for name, value in os.environ.items() if name not in OF_TORCHRUN and not name.startswith("TORCHELASTIC_")}
        with self.log.open("w") as out:              # prctl 1 is Linux's PR_SET_PDEATHSIG
            self.process = subprocess.Popen(argv, env=ours | extra, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                                            start_new_session=True, preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGTERM))

    def check(self) -> None:
        """Raise ConfigError with the end of its log when the server is gone."""
        if self.process.poll() is not None:
            tail = "".join(self.log.open(errors="replace").readlines()[-15:])
            raise ConfigError(f"the vLLM server exited with code {self.process.returncode}; the end of {self.log}:\n{tail}")

    def stop(self) -> None:
        """End the server and everything it started; returns within 20 s."""
        for sig in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + 10
            try:
                os.killpg(self.process.pid, sig)
                while time.monotonic() < deadline:
                    self.process.poll()              # reap it, or its group never empties
                    os.killpg(self.process.pid, 0)
                    time.sleep(0.1)
            except ProcessLookupError:
                return


def aside(act: Callable, *args, **how) -> Future:
    """What `act` gives, from a daemon thread: neither a signal that stops the run at once nor its end waits for a server."""
    given = Future()

    def run():
        try:
            given.set_result(act(*args, **how))
        except BaseException as error:           # whatever it is, somebody waits
            given.set_exception(error)
    threading.Thread(target=run, daemon=True, name="aside").start()
    return given


def ask(method: str, url: str, **how) -> requests.Response:
    """Without the environment's proxies, as the rollouts' requests go: a server is on this network. Its certificates count (REQUESTS_CA_BUNDLE)."""
    return requests.request(method, url, proxies=dict(http="", https=""), **how)      # no_proxy="*" would be written into the environment, which threads share


def answers(url: str) -> bool:
    try:
        return ask("GET", f"{url}/health", timeout=5).status_code == 200
    except requests.RequestException:
        return False


def wait_for_server(config: Config, server: Server | None) -> None:
    """Return once /health of all answers; raise ConfigError when a server of ours exits or vllm_server_timeout runs out."""
    started, next_word = time.monotonic(), 0.0
    while url := next((url for url in config.server_urls if not answers(url)), None):
        if server:
            server.check()
        waited = time.monotonic() - started
        if waited > config.vllm_server_timeout:
            raise ConfigError(f"no vLLM server answered at {url} within vllm_server_timeout={config.vllm_server_timeout:.0f} s: "
                              "start one with python serve.py, or correct vllm_server_base_url.")
        if waited >= next_word:
            hint, next_word = "" if server else "; start one with: python serve.py <this config>", next_word + 30
            print(f"waiting for the vLLM server at {url} ({waited:.0f} s){hint}", flush=True)
        time.sleep(0.5)


def told(url: str, path: str, key: str, otherwise: str, within: float, **params):
    """What the JSON of a GET has under `key`. Raises ConfigError: `otherwise`, with {} for what came instead in `within` seconds."""
    try:
        reply = ask("GET", url + path, params=params, timeout=within)
        if reply.status_code == 200:
            return reply.json()[key]
        instead = reply.status_code
    except requests.JSONDecodeError:
        instead = repr(reply.text[:100])
    except (requests.RequestException, LookupError, TypeError) as error:
        instead = repr(error)
    raise ConfigError(otherwise.format(instead))


def check_server(config: Config, url: str, within: float = 60.0) -> int:
    """The server's max_model_len. Raises ConfigError when it does not serve what the config says."""
    served = told(url, "/v1/models", "data", f"{url} is not a vLLM server (GET /v1/models answered {{}}): correct vllm_server_base_url.", within)
    ours = [model for model in served if model["id"] == config.model]        # the name that requests use
    if not ours:
        raise ConfigError(f"the server at {url} serves {', '.join(m['id'] for m in served)}, the config says {config.model}: {RESTART}")
    info = told(url, "/server_info", "vllm_config", f"the server at {url} does not offer /server_info (it answered {{}}), so its weights cannot be updated either: "
                f"set VLLM_SERVER_DEV_MODE=1 and {RESTART}", within, config_format="json")
    found = info["model_config"] | dict(max_model_len=ours[0]["max_model_len"])
    wanted = dict(max_model_len=config.vllm_max_model_length or found["max_model_len"], dtype=compute_dtype(config, torch.device(device_type(config))), logprobs_mode="processed_logprobs")
    if different := ", ".join(f"{name} {found[name]}, the config says {value}" for name, value in wanted.items() if str(found[name]) != str(value)):
        raise ConfigError(f"the server at {url} has {different}: {RESTART}")
    if -1 != found["max_logprobs"] <= config.num_sampler_logprobs:       # -1: no limit
        raise ConfigError(f"the server at {url} has max_logprobs {found['max_logprobs']}, num_sampler_logprobs={config.num_sampler_logprobs} needs one more: {RESTART}")
    if config.restricted_sampling and device_type(config) != "cpu" and found.get("return_sampling_mask") is False:        # an older one knows no such flag, and a CPU refuses it
        raise ConfigError(f"the server at {url} runs without --return-sampling-mask, which top_k, top_p and min_p need: {RESTART}")
    return found["max_model_len"]


def main(argv: list[str]) -> None:
    try:
        command, extra = server_command(load_config([argument for argument in argv if argument != "--print"]))
    except ConfigError as error:
        sys.exit(f"error: {error}")
    print(" ".join([*(f"{key}={shlex.quote(value)}" for key, value in extra.items()), shlex.join(command)]), flush=True)
    if "--print" not in argv:
        os.execvpe(command[0], command, os.environ | extra)


if __name__ == "__main__":
    main(sys.argv[1:])
