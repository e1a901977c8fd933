"""From pause to resume: how long a weight sync keeps a server from generating, phase by phase, and beside it vLLM's own sender.

    python bench/sync.py configs/x.py [times=20] [own=true] [any option of the config=value …]

Starts a server of the config, syncs changed weights `times` times and prints one JSON object a line, the last with medians. Works with
every weight_sync_backend; disk and ipc also on a CPU, where ipc goes through shared memory. With own=true the same server (ipc on a GPU,
vLLM 0.28 or newer) also gets the weights from vLLM's IPCTrainerWeightTransferEngine, in turns. The first gather lies before the pause, and
gb_per_s is of the transfer alone. After each sender the proof of sync must hold.
"""
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from config import load_config  # noqa: E402
from flags import server_command  # noqa: E402
from metrics import Window  # noqa: E402
from model import compute_dtype, device_type, load_policy  # noqa: E402
from proof import Proof  # noqa: E402
from serve import answers  # noqa: E402
from shard import shard  # noqa: E402
from sync import make_sync  # noqa: E402
from weights import announced, gathered, pieces  # noqa: E402


def ours(sync, version):
    """Seconds by phase."""
    started = time.perf_counter()
    sync.push(version, Window())
    return sync.phases | dict(pause_to_resume=sync.paused, total=time.perf_counter() - started)


def make_own(policy, dtype, url):
    """version → seconds by phase of vLLM's own sender."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine

    class Source(WeightSource):
        def metadata(self):
            return [ParamMeta(*tensor) for tensor in announced(policy.lm, pieces(policy, dtype))]

        def __iter__(self):
            for unit in gathered(policy.lm, pieces(policy, dtype)):
                yield from unit.items()

    class Timed(HTTPVLLMWeightSyncClient):
        def _post(self, path, json=None):
            started = time.perf_counter()
            super()._post(path, json)
            seconds[path] = seconds.get(path, 0.0) + time.perf_counter() - started

    seconds, client = {}, Timed(url)
    engine = IPCTrainerWeightTransferEngine.trainer_init(IPCTrainerInitInfo(rank=0, packed=False), client=client, source=Source())

    @torch.no_grad()
    def send(version):
        seconds.clear()
        started = time.perf_counter()
        client._post("pause?mode=keep")
        engine.send_weights()
        client._post("reset_prefix_cache?reset_running_requests=true")
        client._post("update_weight_version", dict(new_version=str(version)))
        client._post("resume")
        total = time.perf_counter() - started
        names = dict(pause="pause?mode=keep", start="start_weight_update", transfer="update_weights", finish="finish_weight_update", resume="resume")
        return {name: seconds[path] for name, path in names.items()} | dict(pause_to_resume=total, total=total)
    return send


def start(config, own):
    argv, environment = server_command(config)
    if own:
        argv, environment = argv + ["--weight-transfer-config", json.dumps(dict(backend="ipc"))], environment | dict(VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    assert not answers(config.server_urls[0]), f"something already answers at {config.server_urls[0]}"
    Path(config.output_dir).mkdir(parents=True, exist_ok=True)
    with (Path(config.output_dir) / "vllm.log").open("w") as log:
        return subprocess.Popen(argv, env=os.environ | environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def main(argv):
    mine = dict(argument.split("=", 1) for argument in argv if argument.startswith(("times=", "own=")))
    times, own = int(mine.get("times", 20)), mine.get("own") == "true"
    config = load_config([argument for argument in argv if not argument.startswith(("times=", "own="))])
    device = torch.device(device_type(config))
    dtype = compute_dtype(config, device)
    server = start(config, own)
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        policy = load_policy(config, device)
        shard(policy, dist.init_device_mesh(device.type, (1,)), dtype)
        while not answers(config.server_urls[0]):
            assert server.poll() is None, f"the server ended: see {config.output_dir}/vllm.log"
            time.sleep(0.5)
        sync = make_sync(config, policy, dtype)
        proof = Proof(config, policy, sync, dtype)
        size = sum(torch.Size(shape).numel() * kind.itemsize for _, kind, shape in announced(policy.lm, pieces(policy, dtype)))
        senders = {config.weight_sync_backend: lambda version: ours(sync, version)} | ({"vllm": make_own(policy, dtype, config.server_urls[0])} if own else {})
        found = {name: [] for name in senders}
        for version in range(times * len(senders)):
            name = list(senders)[version % len(senders)]
            with torch.no_grad():
                for p in policy.parameters():
                    if p.requires_grad:
                        p.mul_(1.0 + 1e-3 * (-1) ** version)
            seconds = senders[name](version)
            sync.current = [0]
            proof.scores[version] = proof.policy_scores()
            assert (problem := proof.problem(version)) is None, problem
            found[name].append(seconds)
            print(json.dumps(dict(sender=name, version=version, **{f"{phase}_ms": round(s * 1e3, 2) for phase, s in seconds.items()})), flush=True)
        for name, all_seconds in found.items():
            medians = {phase: statistics.median(seconds[phase] for seconds in all_seconds[1:] or all_seconds) for phase in all_seconds[0]}      # the first one sets up
            print(json.dumps(dict(sender=name, syncs=times, bytes=size, **{f"median_{phase}_ms": round(s * 1e3, 2) for phase, s in medians.items()},
                                  gb_per_s=round(size / medians["transfer"] / 1e9, 2))), flush=True)
    finally:
        os.killpg(server.pid, 15)
        server.wait(30)


if __name__ == "__main__":
    main(sys.argv[1:])
