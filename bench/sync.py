"""From pause to resume: how long a weight sync keeps a server from generating, phase by phase, and beside it vLLM's own sender.

    python bench/sync.py configs/x.py [times=20] [own=true] [server=running] [any option of the config=value …]

Starts a server of the config, syncs changed weights `times` times and prints one JSON object a line, the last with medians. Works with
every weight_sync_backend, also on a CPU, where shared memory stands in for ipc and gloo for nccl; for nccl on GPUs the server gets the second. With
own=true the same server (on a GPU, vLLM 0.26 or 0.27) then gets them as often from the sender that vLLM has for trainers. Of ours the first
gather lies before the pause; gb_per_s is of the transfer phase. After each sync the proof of sync must hold. server=running takes the one that answers, which
keeps the changed weights. free_gb is the trainer's GPU's.
"""
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import requests
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
from transport import own_address  # noqa: E402
from weights import announced, gathered, pieces  # noqa: E402


OWN = ("times=", "own=", "server=")


def ours(sync, version):
    """Seconds by phase."""
    started = time.perf_counter()
    sync.push(version, Window())
    return sync.phases | dict(pause_to_resume=sync.paused, total=time.perf_counter() - started)


def make_own(policy, dtype, url, backend, text):
    """version → seconds by phase of the sender that vLLM 0.26 and 0.27 have for trainers (later ones have another)."""
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
    assert hasattr(NCCLWeightTransferEngine, "trainer_send_weights"), "own=true needs vLLM 0.26 or 0.27"
    seconds, threads = {}, ThreadPoolExecutor(1)

    def post(phase, path, body=None):
        started = time.perf_counter()
        reply = requests.post(f"{url}/{path}", json=body, timeout=300)
        assert reply.ok or path == "update_weight_version" and reply.status_code == 404, f"{path}: {reply.status_code} {reply.text[:500]}"     # 0.26 has none
        seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - started

    def tensors():
        for unit in gathered(policy.lm, pieces(policy, dtype, text=text)):
            yield from unit.items()

    init = {}
    if backend == "nccl":
        world = requests.get(f"{url}/get_world_size", timeout=60).json()["world_size"] + 1
        with socket.socket() as probe:
            probe.bind(("", 0))
            init = dict(master_address=own_address(url), master_port=probe.getsockname()[1], world_size=world)
        joining = threads.submit(post, "init", "init_weight_transfer_engine", dict(init_info=init | dict(rank_offset=1)))
        group = NCCLWeightTransferEngine.trainer_init(init)
        joining.result()
    else:
        post("init", "init_weight_transfer_engine", dict(init_info={}))

    def transfer():
        if backend == "ipc":
            return IPCWeightTransferEngine.trainer_send_weights(tensors(), dict(send_mode="http", url=url))
        names, dtypes, shapes = zip(*((name, str(kind).removeprefix("torch."), list(shape)) for name, kind, shape in announced(policy.lm, pieces(policy, dtype, text=text))))
        receiving = threads.submit(post, "update", "update_weights", dict(update_info=dict(names=names, dtype_names=dtypes, shapes=shapes, packed=True)))
        NCCLWeightTransferEngine.trainer_send_weights(tensors(), dict(group=group, packed=True))
        receiving.result()

    @torch.no_grad()
    def send(version):
        seconds.clear()
        started = time.perf_counter()
        post("pause", "pause?mode=keep")
        post("start", "start_weight_update", dict(is_checkpoint_format=True))
        begun = time.perf_counter()
        transfer()
        seconds["transfer"] = time.perf_counter() - begun
        post("finish", "finish_weight_update")
        post("finish", "reset_prefix_cache?reset_running_requests=true")
        post("finish", "update_weight_version", dict(new_version=str(version)))
        post("resume", "resume")
        return dict(seconds, pause_to_resume=time.perf_counter() - started)
    return send


def free_gb(device):
    return round(torch.cuda.mem_get_info(device)[0] / 1e9, 2) if device.type == "cuda" else None


def milliseconds(seconds):
    return {f"{phase}_ms": round(value * 1e3, 2) for phase, value in seconds.items()}


def start(config, own):
    argv, environment = server_command(config)
    assert not answers(config.server_urls[0]), f"something already answers at {config.server_urls[0]}: stop it, or add server=running to send it these weights"
    if own and config.weight_sync_backend == "ipc":
        argv, environment = argv + ["--weight-transfer-config", json.dumps(dict(backend="ipc"))], environment | dict(VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    if config.weight_sync_backend == "nccl" and torch.cuda.device_count() > 1:
        environment = environment | dict(CUDA_VISIBLE_DEVICES="1")
    Path(config.output_dir).mkdir(parents=True, exist_ok=True)
    with (Path(config.output_dir) / "vllm.log").open("w") as log:
        return subprocess.Popen(argv, env=os.environ | environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def main(argv):
    mine = dict(argument.split("=", 1) for argument in argv if argument.startswith(OWN))
    times, own = int(mine.get("times", 20)), mine.get("own") == "true"
    config = load_config([argument for argument in argv if not argument.startswith(OWN)])
    device = torch.device(device_type(config))
    dtype = compute_dtype(config, device)
    server = None if mine.get("server") == "running" else start(config, own)
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        policy = load_policy(config, device)
        shard(policy, dist.init_device_mesh(device.type, (1,)), dtype)
        while not answers(config.server_urls[0]):
            assert server, f"nothing answers at {config.server_urls[0]}: start a server there, or leave server=running out"
            assert server.poll() is None, f"the server ended: see {config.output_dir}/vllm.log"
            time.sleep(0.5)
        sync = make_sync(config, policy, dtype)
        proof = Proof(config, policy, sync, dtype)
        text = config.weight_sync_backend != "disk" and sync.transport.staging.text      # as the transport sends, by disk after the first sync
        size = sum(torch.Size(shape).numel() * kind.itemsize for _, kind, shape in announced(policy.lm, pieces(policy, dtype, text=text)))
        for name in [config.weight_sync_backend] + ["vllm"] * own:
            send = make_own(policy, dtype, config.server_urls[0], config.weight_sync_backend, text) if name == "vllm" else lambda version: ours(sync, version)
            found = []
            for version in range(times):
                with torch.no_grad():
                    for p in policy.parameters():
                        if p.requires_grad:
                            p.mul_(1.0 + 1e-3 * (-1) ** version)
                found.append(send(version))
                sync.current = [0]
                proof.scores[version] = proof.policy_scores()
                assert (problem := proof.problem(version)) is None, problem
                print(json.dumps(dict(sender=name, version=version, **milliseconds(found[-1]), free_gb=free_gb(device))), flush=True)
            medians = {phase: statistics.median(seconds[phase] for seconds in found[1:] or found) for phase in found[-1]}      # the first one sets up
            print(json.dumps(dict(sender=name, syncs=times, bytes=size, **{f"median_{phase}": ms for phase, ms in milliseconds(medians).items()},
                                  gb_per_s=round(size / medians["transfer"] / 1e9, 2), free_gb=free_gb(device))), flush=True)
    finally:
        for signal in (15, 9) if server else ():     # one that is left keeps its memory from the next measurement
            try:
                os.killpg(server.pid, signal)
                server.wait(20)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                pass


if __name__ == "__main__":
    main(sys.argv[1:])
