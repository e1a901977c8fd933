"""The exact `vllm serve` command a config needs, so that no flag can disagree with the trainer.

    python serve.py configs/x.py [key=value …]            run it
    python serve.py configs/x.py [key=value …] --print    print it

With launch_server=True train.py starts, watches and stops the same command itself.
"""
import ctypes
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlparse

import requests
import torch

from config import Config, ConfigError, load_config


def server_dtype(config: Config) -> str:
    """What the server computes in: the trainer's compute dtype, since a precision gap biases every ratio."""
    from model import compute_dtype
    return str(compute_dtype(config, torch.device(device_type(config)))).removeprefix("torch.")


def device_type(config: Config) -> str:
    return "cuda" if torch.cuda.is_available() and not config.use_cpu else "cpu"


def cpu_threads() -> int:
    """Without a GPU, server and trainer share the cores: half each, since two full sets of spinning threads starve both."""
    return max((os.cpu_count() or 2) // 2, 1)


def server_command(config: Config) -> tuple[list[str], dict[str, str]]:
    """(argv, environment variables to add) of the server."""
    url = urlparse(config.vllm_server_base_url)
    on_cpu = device_type(config) == "cpu"
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", config.model] if on_cpu else [*vllm_cli(), "serve", config.model]
    argv += ["--host", url.hostname or "localhost", "--port", str(url.port or 8000), "--dtype", server_dtype(config),
             "--seed", str(config.seed), "--generation-config", "vllm", "--logprobs-mode", "processed_logprobs",
             "--max-logprobs", str(max(20, config.num_sampler_logprobs + 1))]
    if vllm_has_flag("enable_scale_out"):            # older ones offer /inference/v1/generate without it
        argv += ["--enable-scale-out"]
    if config.vllm_max_model_length:
        argv += ["--max-model-len", str(config.vllm_max_model_length)]
    if config.restricted_sampling:
        argv += ["--return-sampling-mask"]
    if config.trust_remote_code:
        argv += ["--trust-remote-code"]
    if on_cpu:
        return argv + ["--enforce-eager"], dict(VLLM_SERVER_DEV_MODE="1", VLLM_CPU_KVCACHE_SPACE="2", OMP_NUM_THREADS=str(cpu_threads()))
    return argv + ["--api-server-count", "8"], dict(VLLM_SERVER_DEV_MODE="1")


def _die_with_parent() -> None:
    """In the child: SIGTERM when the parent dies, however it dies (Linux prctl PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


class Server:
    """A vLLM server this process owns. Its output goes to `log`."""

    def __init__(self, config: Config):
        argv, extra = server_command(config)
        self.url, self.timeout = config.vllm_server_base_url.rstrip("/"), config.vllm_server_timeout
        if _answers(self.url):
            raise ConfigError(f"launch_server=True, but something already answers at {self.url}: stop it, or set launch_server=False to use it.")
        self.log = Path(config.output_dir) / "vllm.log"
        with self.log.open("w") as out:
            self.process = subprocess.Popen(argv, env=os.environ | extra, stdout=out, stderr=subprocess.STDOUT,
                                            stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_parent)

    def check(self) -> None:
        """Raise ConfigError with the end of its log when the server is gone."""
        if self.process.poll() is not None:
            tail = "".join(self.log.open(errors="replace").readlines()[-15:])
            raise ConfigError(f"the vLLM server exited with code {self.process.returncode}; the end of {self.log}:\n{tail}")

    def stop(self) -> None:
        """End the server and everything it started; returns within 20 s."""
        for sig, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
            try:
                os.killpg(self.process.pid, sig)
            except ProcessLookupError:
                break
            deadline = time.monotonic() + patience
            while time.monotonic() < deadline and _group_alive(self.process.pid):
                self.process.poll()      # reap, or the group never empties
                time.sleep(0.1)
        self.process.wait()


def _group_alive(pgid: int) -> bool:
    try:
        os.killpg(pgid, 0)
        return True
    except ProcessLookupError:
        return False


def _answers(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=5).status_code == 200
    except requests.RequestException:
        return False


def wait_for_server(config: Config, server: Server | None) -> None:
    """Return once /health answers; raise ConfigError when a server of ours exits or vllm_server_timeout runs out."""
    url = config.vllm_server_base_url.rstrip("/")
    started, told = time.monotonic(), 0.0
    while not _answers(url):
        waited = time.monotonic() - started
        if server:
            server.check()
        elif told == 0.0:
            print(f"waiting for a vLLM server at {url}; start one with: python serve.py <this config>", flush=True)
        if waited > config.vllm_server_timeout:
            raise ConfigError(f"no vLLM server answered at {url} within vllm_server_timeout={config.vllm_server_timeout:.0f} s: "
                              "start one with python serve.py, or correct vllm_server_base_url.")
        if waited - told >= 30:
            print(f"still waiting for {url} ({waited:.0f} s)", flush=True)
        told = max(told, waited // 30 * 30, 1e-9)
        time.sleep(0.5)


def check_server(config: Config) -> int:
    """The server's max_model_len. Raises ConfigError when it does not serve what the config says."""
    url = config.vllm_server_base_url.rstrip("/")
    restart = "restart it with: python serve.py <this config>"
    models = requests.get(f"{url}/v1/models", timeout=30)
    if models.status_code != 200:
        raise ConfigError(f"{url} is not a vLLM server (GET /v1/models answered {models.status_code}): correct vllm_server_base_url.")
    served = models.json()["data"]
    entry = next((model for model in served if config.model in (model["id"], model.get("root"))), None)
    if entry is None:
        raise ConfigError(f"the server at {url} serves {', '.join(m['id'] for m in served)}, the config says {config.model}: {restart}")
    if config.vllm_max_model_length not in (None, entry["max_model_len"]):
        raise ConfigError(f"the server at {url} has max_model_len {entry['max_model_len']}, the config says {config.vllm_max_model_length}: {restart}")
    info = requests.get(f"{url}/server_info", params=dict(config_format="json"), timeout=60)
    if info.status_code != 200:
        raise ConfigError(f"the server at {url} does not offer /server_info, so its weights cannot be updated either: set VLLM_SERVER_DEV_MODE=1 and {restart}")
    model = info.json()["vllm_config"]["model_config"]
    wanted = dict(dtype=f"torch.{server_dtype(config)}", logprobs_mode="processed_logprobs")
    for name, value in wanted.items():
        if str(model[name]) != value:
            raise ConfigError(f"the server at {url} has {name} {model[name]}, the config needs {value}: {restart}")
    if model["max_logprobs"] <= config.num_sampler_logprobs:
        raise ConfigError(f"the server at {url} has max_logprobs {model['max_logprobs']}, num_sampler_logprobs={config.num_sampler_logprobs} needs one more: {restart}")
    return entry["max_model_len"]


def vllm_cli() -> list[str]:
    return ["vllm"] if shutil.which("vllm") else [sys.executable, "-m", "vllm.entrypoints.cli.main"]


def vllm_has_flag(name: str) -> bool:
    """Whether the vLLM installed here knows an argument, looked up in its sources: importing it takes seconds."""
    spec = importlib.util.find_spec("vllm")
    if spec is None:
        return True                                  # printed here, run elsewhere: the newest
    return any(name in path.read_text() for path in Path(spec.submodule_search_locations[0], "entrypoints").rglob("cli_args.py"))


def main(argv: list[str]) -> None:
    show = "--print" in argv
    try:
        config = load_config([a for a in argv if a != "--print"])
        command, extra = server_command(config)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    line = " ".join([*(f"{k}={shlex.quote(v)}" for k, v in extra.items()), shlex.join(command)])
    print(line, flush=True)
    if not show:
        os.execvpe(command[0], command, os.environ | extra)


if __name__ == "__main__":
    main(sys.argv[1:])
