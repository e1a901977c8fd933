"""Weights to the servers. A version number is given out only after a server has confirmed that version."""
import math
import shutil
import time
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path

import requests
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from adapters import Adapters, check_adapter_server, takes_adapters
from config import Config, ConfigError
from metrics import Window
from model import Policy
from serve import RESTART, answers, aside, ask, check_server
from transport import ENGINE_SECONDS, Ipc, Nccl
from weights import gathered_weights, write_weights

UNREACHABLE = "it cannot be reached"
BACK_SECONDS = 10.0      # for each answer of a server out of use: the others wait meanwhile
RETRY_SECONDS = 22.0     # with what else a failing run does, under half a minute
REST_SECONDS = 120.0     # from one vain attempt at a server out of use, for which the others may have been paused, to the next


class Silent(RuntimeError):
    """A server did not answer at all."""


class SyncFailed(ConfigError, RuntimeError):
    """Ends the run with its sentence: most often a server is to be put right, and none of the run's own state is lost with it."""


class Control:
    """HTTP to the servers' weight endpoints. What may be repeated is, so a server that cannot be reached is given `patience` seconds."""

    def __init__(self, urls: list[str], timeout: float, check_server: Callable[[], None]):
        self.urls, self.timeout, self.check_server, self.retries = urls, timeout, check_server, 0
        self.patience = [RETRY_SECONDS] * len(urls)

    def post(self, server: int, phase: str, path: str, body: dict | None = None, optional: bool = False, within: float = math.inf, once: bool = False) -> str:
        """The reply's text. `once`: what was begun and is begun again would wait for ever. Raises RuntimeError that names the phase and says what the server said."""
        deadline = time.monotonic() + self.patience[server]
        while True:
            problem, text = self._try(self.urls[server] + path, body, optional, within)
            if problem is not UNREACHABLE or time.monotonic() > deadline:
                break
            self.watch_end() if once else self.check_server()
            if once:
                break
            self.retries += 1
            time.sleep(1)
        if problem:
            raise RuntimeError(f"weight sync failed in its phase '{phase}' at {self.urls[server]} ({problem}).")
        return text

    def watch_end(self) -> None:
        """One of ours that has just closed its connections says more, in its log, once it has ended."""
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            self.check_server()
            time.sleep(0.05)

    def _try(self, url: str, body: dict | None, optional: bool, within: float) -> tuple[str | None, str]:
        """(what went wrong, if anything; the reply's text)"""
        try:
            reply = ask("POST", url, json=body, timeout=(5, min(self.timeout, within)))
        except requests.exceptions.ReadTimeout:
            return f"no answer in {min(self.timeout, within):.0f} s", ""
        except (requests.ConnectionError, requests.exceptions.ChunkedEncodingError):         # the latter in the middle of a reply
            return UNREACHABLE, ""
        except requests.RequestException as error:
            return str(error), ""
        done = reply.status_code == 200 and '"success":false' not in reply.text.replace(" ", "")
        return None if done or (optional and reply.status_code == 404) else f"{reply.status_code}: {reply.text[:500]}", reply.text

    def try_once(self, server: int, path: str, body: dict | None = None, within: float = math.inf) -> bool:
        """For clean-up, where a failure must not hide the error before it."""
        return self._try(self.urls[server] + path, body, True, within)[0] is None

    def reply(self, server: int, path: str, body: dict | None = None, within: float = math.inf, **params) -> requests.Response:
        """To a POST of `body`, or a GET. Raises Silent when none comes."""
        try:
            return ask("GET" if body is None else "POST", self.urls[server] + path, json=body, params=params, timeout=(5, min(self.timeout, within)))
        except requests.RequestException as error:
            raise Silent(f"{self.urls[server]} did not answer {path}: {error}") from error

    def weight_version(self, server: int, within: float = math.inf) -> str | None:
        """The version that the server's engine says it has, where it keeps one."""
        reply = self.reply(server, "/weight_info", within=min(within, ENGINE_SECONDS))
        return reply.json().get("weight_version") if reply.status_code == 200 else None


class Disk:
    """The servers reload a folder that rank 0 writes, so all must see the same path."""

    chunks, pauses = 1, True

    def __init__(self, config: Config, policy: Policy, dtype: torch.dtype, control: Control):
        self.policy, self.dtype, self.control, self.whole = policy, dtype, control, True
        self.folder = Path(config.output_dir).resolve() / ".weights"
        self.on_cpu = next(policy.parameters()).device.type == "cpu"
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder, ignore_errors=True)

    def stage(self, chunk: int, version: int) -> Callable[[], None]:
        weights = gathered_weights(self.policy, self.dtype, every_name=self.on_cpu, text=self.whole)     # vLLM on a CPU keeps a copy of a tied head
        return lambda: self._write(weights, version)

    def _write(self, weights: dict[str, Tensor], version: int) -> None:
        """A folder appears whole or not at all."""
        self.target = self.folder / f"version_{version}"
        partial = self.target.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        write_weights(weights, partial)
        partial.rename(self.target)

    begin = finish = lambda self, *server_and_version: None          # the reload is all

    def send(self, server: int, chunk: int) -> None:
        self.control.post(server, "reload", "/collective_rpc", dict(method="reload_weights", kwargs=dict(weights_path=str(self.target))))

    def clean(self, version: int) -> None:
        shutil.rmtree(self.target, ignore_errors=True)


def make_sync(config: Config, policy: Policy, dtype: torch.dtype, shared=None, check_own: Callable[[], None] = lambda: None, max_model_len: int = 0) -> "WeightSync":
    """The transport that the config names, or adapters alone where every server takes them. The same choice on every rank. Raises ConfigError."""
    control = Control(config.server_urls, config.vllm_server_timeout, check_own)

    def all_take_adapters(servers: list[int], within: float = math.inf) -> bool:
        """Where one does not, none is refused for what merged weights do not need."""
        infos = {server: control.reply(server, "/server_info", within=within, config_format="json").json()["vllm_config"] for server in servers}
        taken = all([takes_adapters(policy.peft_config, control.urls[server], info) for server, info in infos.items()])
        for server, info in infos.items() if taken else ():
            check_adapter_server(policy.peft_config, config.max_staleness, control.urls[server], info, control.weight_version(server, within))
        return taken

    def check_back(server: int) -> None:
        """Raise ConfigError where a server that is back, which may be another by now, is not as all had to be at the start."""
        if (length := check_server(config, url := control.urls[server], BACK_SECONDS)) < max_model_len:
            raise ConfigError(f"the server at {url} has max_model_len {length}, the run needs {max_model_len}: {RESTART}")
        if adapters[0] and not all_take_adapters([server], BACK_SECONDS):
            raise ConfigError(f"the server at {url} takes no adapters any more: {RESTART}")
    try:
        adapters = [bool(policy.peft_config) and all_take_adapters(list(range(len(control.urls)))) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(adapters, src=0)
        transport = Adapters(config, policy, dtype, control, shared) if adapters[0] else dict(disk=Disk, nccl=Nccl, ipc=Ipc)[config.weight_sync_backend](config, policy, dtype, control)
    except Silent as error:
        raise ConfigError(f"{error}. It may wait in the broadcast of a trainer that was killed: start it again.") from None
    return WeightSync(transport, control, shared, check_back)


class WeightSync:
    """One policy, its servers, and the transport between them.

    A server that fails while another succeeds is out of use until a later sync finds it answering; see client.Servers.
    """

    def __init__(self, transport, control: Control, shared=None, check_back: Callable[[int], None] = lambda server: None):
        self.transport, self.control, self.shared, self.check_back = transport, control, shared, check_back
        self.names_adapters = isinstance(transport, Adapters)
        self.phases: dict[str, float] = {}       # seconds of the last push, by phase
        self.paused = 0.0                        # of it, from the pause until every server had resumed
        self.current: list[int] = []             # servers that have the weights of the last push
        self.whole: bool | None = None           # the last push was the first, or to a server that is back: another run's weights may lie there, so what of the text model is frozen goes too
        self.resting: dict[int, tuple[float, Exception]] = {}        # servers out of use, until when they are not asked, and why

    def push(self, version: int, window: Window) -> None:
        """Every server in use gets the weights of `version`. Raises SyncFailed on all ranks, naming the phase, when none has them.

        Every rank gathers the same chunks in the same order, whatever fails at the servers.
        """
        started, transport = time.monotonic(), self.transport
        alive = self._servers() if dist.get_rank() == 0 else {}
        self.tried = [server for server, error in alive.items() if error is None]
        whole = [self.whole is None or not all(self.in_use[server] for server in self.tried)]
        dist.broadcast_object_list(whole, src=0)
        self.whole = transport.whole = whole[0]
        self.phases = dict.fromkeys(("gather", "pause", "transfer", "finish", "resume"), 0.0)
        for chunk in range(transport.chunks):
            begun = time.monotonic()
            fill = transport.stage(chunk, version)
            if dist.get_rank() == 0:
                self._guard(alive, "writing", fill)
                self.phases["gather"] += time.monotonic() - begun
                if chunk == 0:
                    pausing = time.monotonic()
                    if transport.pauses:
                        self._each(alive, "pause", self._pause)
                    self._each(alive, "transfer", transport.begin)
                self._each(alive, "transfer", lambda server: transport.send(server, chunk))
        if dist.get_rank() == 0:
            self._each(alive, "finish", lambda server: self._finish(server, version))
            self._each(alive, "resume", self._resume)
            self.paused = time.monotonic() - pausing
            self._settle(alive, version)
            self.current = [server for server, error in alive.items() if error is None]
            transport.clean(version)
        waiting = time.monotonic()
        self._agree(alive)
        window.add_all({"perf/weight_sync_pause_s": self.phases["pause"], "perf/weight_sync_barrier_s": time.monotonic() - waiting,
                        "perf/weight_sync_transfer_s": sum(self.phases[name] for name in ("gather", "transfer", "finish")),
                        "perf/weight_sync_s": time.monotonic() - started})
        if dist.get_rank() == 0:
            window.add("perf/weight_sync_retry_count", self.control.retries)
            self.control.retries = 0

    def _servers(self) -> dict[int, Exception | None]:
        """Every server, with what went wrong at it so far."""
        urls = self.control.urls
        self.lost = list(self.shared.lost) if self.shared else [0] * len(urls)
        self.in_use = [not self.shared or self.shared.restored[server] == lost for server, lost in enumerate(self.lost)]
        self.control.patience = [RETRY_SECONDS if in_use else 0 for in_use in self.in_use]
        return {server: None if in_use else self._absent(server) for server, in_use in enumerate(self.in_use)}

    def _absent(self, server: int) -> Exception | None:
        """Why a server out of use stays so; None: it is back."""
        url, asked, (until, error) = self.control.urls[server], time.monotonic(), self.resting.get(server, (0.0, None))
        if asked < until and any(self.in_use):
            return error
        answered, error = answers(url), None
        try:
            self.check_back(server) if answered else None
        except Exception as problem:             # whatever now answers there
            error = problem
            print(f"still out of use: {error}", flush=True)
        error = error if answered else RuntimeError(f"{url} does not answer.")
        self.resting.pop(server, None)
        if error is not None and (answered or time.monotonic() - asked > 1):         # one that is not there says so at once, and costs nothing
            self.resting[server] = time.monotonic() + REST_SECONDS, error
        return error

    def _each(self, alive: dict[int, Exception | None], phase: str, act: Callable[[int], None]) -> None:
        """`act` at all servers at once where nothing has gone wrong."""
        begun, acts = time.monotonic(), {server: aside(act, server) for server, error in alive.items() if error is None}
        while wait(acts.values(), timeout=0.25).not_done:        # a signal may reach another thread: it is acted on only when this one wakes
            pass
        for server, done in acts.items():
            if isinstance(error := done.exception(), ConfigError):           # the one that this run started has ended
                raise error
            if error is not None:                # an odd answer is that server's failure, whatever it does to the code that reads it
                alive[server] = error if isinstance(error, RuntimeError) else RuntimeError(f"weight sync failed in its phase '{phase}' at {self.control.urls[server]} ({error!r}).")
        self.phases[phase] += time.monotonic() - begun

    def _guard(self, alive: dict[int, Exception | None], phase: str, act: Callable[[], None]) -> None:
        """What fails here, such as a full disk, fails all servers: the other ranks must not be left in a collective."""
        try:
            act()
        except (OSError, RuntimeError, SafetensorError) as error:
            alive |= {server: alive[server] or RuntimeError(f"weight sync failed in its phase '{phase}' ({error}).") for server in alive}

    def _pause(self, server: int) -> None:
        """Requests stay in the server and go on after the resume. One that cannot pause still has all of its old weights, and may serve on."""
        try:
            self.control.post(server, "pause", "/pause?mode=keep", within=ENGINE_SECONDS if self.in_use[server] else BACK_SECONDS)
        except RuntimeError:
            self.control.try_once(server, "/resume", within=5.0)
            raise

    def _finish(self, server: int, version: int) -> None:
        self.transport.finish(server, version)
        if self.transport.pauses:        # what the old weights cached goes, and kept requests are recomputed
            self.control.post(server, "reset of the prefix cache", "/reset_prefix_cache?reset_running_requests=true")
            self.control.post(server, "version", "/update_weight_version", dict(new_version=str(version)), optional=True)     # per-token versions

    def _resume(self, server: int) -> None:
        if self.transport.pauses:
            self.control.post(server, "resume", "/resume")

    def _settle(self, alive: dict[int, Exception | None], version: int) -> None:
        """Tell the rollout process which servers are in use: a failed one, which may be paused half way, comes back only with whole weights."""
        for server, error in alive.items():
            url = self.control.urls[server]
            if error is not None and self.in_use[server] and len(alive) > 1:
                print(f"out of use: {error}", flush=True)
            if error is not None and not self.in_use[server] and server in self.tried:
                self.resting[server] = time.monotonic() + REST_SECONDS, error
            if error is None and not self.in_use[server]:
                print(f"the server at {url} is back, with the weights of version {version}", flush=True)
            if self.shared:
                self.shared.restored[server] = -1 if error is not None else self.lost[server]    # lost once more meanwhile, it stays out

    def leave_out(self, server: int, problem: str) -> None:
        """It took the weights and fails the proof: out of use until a later sync, and where it was so before not the very next, finds it answering."""
        self.current.remove(server)
        self.resting |= {} if self.in_use[server] else {server: (time.monotonic() + REST_SECONDS, RuntimeError(problem))}
        self.shared.restored[server] = -1
        print(f"out of use: {problem}", flush=True)

    def _agree(self, alive: dict[int, Exception | None]) -> None:
        """All ranks go on, or all raise what rank 0 saw."""
        failed = alive[min(alive, key=lambda server: not self.in_use[server])] if alive and None not in alive.values() else None       # a server long out of use explains nothing
        words = [failed and f"{str(failed).rstrip('.')}. The server keeps its state and may be paused: start the run again, or the server if that fails too."]
        dist.broadcast_object_list(words, src=0)
        if words[0]:
            raise SyncFailed(words[0])
