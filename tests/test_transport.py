"""Weights through memory: what a server process receives over a group, bit for bit, for both of vLLM's interfaces; and the buffer on one machine."""
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests
import torch
import torch.distributed as dist
from conftest import tiny_config, tiny_lm, tiny_lora, tiny_moe, until

import transport
from config import ConfigError
from metrics import Window
from model import Policy
from sync import Control, make_sync
from transport import Ipc, Nccl, check_fits, cut, own_address
from weights import gathered_weights

PORTS = {"0.26.0": 8310, "0.32.0": 8311}


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    for thread in [thread for thread in threading.enumerate() if thread.name == "group"]:      # its server refused: it waits for one to enter
        until(lambda: thread in Gloo.opening)
        Gloo.given_up.add(thread)
        dist.TCPStore(*Gloo.opening[thread], False, timedelta(seconds=60))
        thread.join(60)
        assert not thread.is_alive()


class Gloo:
    """Has the one method of vLLM's communicator that is used."""

    opening, given_up = {}, set()                    # where each thread opens one, and those whose server never enters

    def __init__(self, address, port, rank, world_size, device):
        self.opening[threading.current_thread()] = address, port, world_size
        store = dist.TCPStore(address, port, world_size, True, timedelta(seconds=60))
        if threading.current_thread() not in self.given_up:
            self.group = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=60))

    def broadcast(self, tensor, src, stream=None):
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = src, timedelta(seconds=10)       # what a test waits for whose server has failed
        self.group.broadcast([tensor], options).wait()


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """{version: (url, folder)} of two server processes."""
    folder, found, processes = tmp_path_factory.mktemp("nccl"), {}, []
    for version, port in PORTS.items():
        (folder / version).mkdir()
        processes.append(subprocess.Popen([sys.executable, str(Path(__file__).with_name("nccl_server.py")), str(port), version, str(folder / version)], stdin=subprocess.PIPE))
        found[version] = (f"http://127.0.0.1:{port}", folder / version)
    for url, _ in found.values():
        deadline = time.monotonic() + 300
        while True:
            try:
                requests.get(url + "/version", timeout=60)
                break
            except requests.ConnectionError:
                assert time.monotonic() < deadline
                time.sleep(0.1)
    yield found
    for process in processes:
        process.stdin.close()
        process.wait(60)


def synced(monkeypatch, tmp_path, policy, urls, dtype=torch.bfloat16, limit=3000):
    monkeypatch.setattr(transport, "open_group", Gloo)
    monkeypatch.setattr(Nccl, "limit", limit)
    return make_sync(tiny_config(output_dir=str(tmp_path), vllm_server_base_url=urls, weight_sync_backend="nccl", vllm_server_timeout=120.0), policy, dtype)


def change(policy):
    with torch.no_grad():
        for p in policy.parameters():
            p.mul_(1.1)


@pytest.mark.parametrize("version", PORTS)
@pytest.mark.parametrize("make", [tiny_lm, tiny_moe])
def test_a_server_receives_every_tensor_bitwise_in_its_dtype_over_several_chunks_again_and_again(monkeypatch, tmp_path, group, servers, version, make):
    url, folder = servers[version]
    policy = Policy(make(), 1.0, "sdpa")
    sync = synced(monkeypatch, tmp_path, policy, url)
    assert sync.transport.chunks > 3
    for number in range(3):
        sync.push(number, Window())
        sent, received = gathered_weights(policy, torch.bfloat16, every_name=True), torch.load(folder / f"{number}.pt")
        assert list(received) == list(sent) and all(torch.equal(received[name], sent[name]) and received[name].dtype == torch.bfloat16 for name in sent)
        change(policy)


def test_the_order_is_pause_start_update_finish_reset_resume(monkeypatch, tmp_path, group, servers):
    url, _ = servers["0.32.0"]
    sync = synced(monkeypatch, tmp_path, Policy(tiny_lm(), 1.0, "sdpa"), url)
    sync.push(0, Window())
    before = len(requests.get(url + "/calls", timeout=60).json())
    sync.push(1, Window())
    assert requests.get(url + "/calls", timeout=60).json()[before:] == [
        "/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache", "/update_weight_version", "/resume"]


@pytest.mark.parametrize("path,phase", [("/init_weight_transfer_engine", "connection"), ("/update_weights", "update"), ("/finish_weight_update", "finish"), ("/pause", "pause")])
def test_a_failure_names_its_phase_within_the_timeout_and_the_next_run_works(monkeypatch, tmp_path, group, servers, path, phase):
    """Also after an update that the dead run left open."""
    url, folder = servers["0.32.0"]
    policy = Policy(tiny_lm(), 1.0, "sdpa")
    requests.post(url + "/fail", json=dict(path=path), timeout=60)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"phase '{phase}'.*no memory left"):
        synced(monkeypatch, tmp_path, policy, url, limit=1 << 20).push(1, Window())
    assert time.monotonic() - started < 120
    synced(monkeypatch, tmp_path, policy, url).push(9, Window())
    received = torch.load(folder / "9.pt")
    assert all(torch.equal(received[name], p.to(torch.bfloat16)) for name, p in policy.lm.named_parameters())
    (folder / "9.pt").unlink()


def test_two_servers_have_a_group_each_and_one_that_fails_takes_no_other_with_it(monkeypatch, tmp_path, group, servers):
    """The tiny model fits one chunk here, so the failing one is not waited for in the middle of a broadcast."""
    policy = Policy(tiny_lm(), 1.0, "sdpa")
    sync = synced(monkeypatch, tmp_path, policy, [url for url, _ in servers.values()])
    sync.push(20, Window())
    assert sync.current == [0, 1]
    requests.post(servers["0.26.0"][0] + "/fail", json=dict(path="/finish_weight_update"), timeout=60)
    change(policy)
    sync.push(21, Window())
    assert sync.current == [1] and not (servers["0.26.0"][1] / "21.pt").exists()
    assert torch.equal(torch.load(servers["0.32.0"][1] / "21.pt")["model.norm.weight"], policy.lm.model.norm.weight.to(torch.bfloat16))


def test_merged_adapters_go_through_memory_with_the_whole_text_model_only_where_a_server_may_have_another_runs_weights(monkeypatch, tmp_path, group, servers):
    """The chunks are planned once, so each time; of adapters on q and v alone that is nine times what changes."""
    urls, everything = [url for url, _ in servers.values()], set(tiny_lm().state_dict())
    trained = {name for name in everything if ".self_attn." in name and name.endswith("_proj.weight")}
    for versions, sent in ((("default", "default"), trained), (("default", "7"), everything), ((None, "default"), everything)):
        for url, version in zip(urls, versions):
            requests.post(url + "/update_weight_version", json=dict(new_version=version), timeout=60)
        sync = synced(monkeypatch, tmp_path, tiny_lora(target_modules=["q_proj"]), urls)
        for number in (30, 31):
            sync.push(number, Window())
            received = [torch.load(folder / f"{number}.pt") for _, folder in servers.values()]
            assert all(tensors.keys() == sent for tensors in received) and sync.whole == (number == 30), "the proof is due after a first sync"
            assert sent == trained or torch.equal(received[0]["model.norm.weight"], tiny_lm().model.norm.weight.to(torch.bfloat16))


def test_every_rank_plans_the_chunks_that_rank_0_found_to_be_needed(monkeypatch):
    told = []
    monkeypatch.setattr(transport.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(transport.dist, "broadcast_object_list", lambda found, src: (told.append(list(found)), found.__setitem__(0, True)))
    assert transport.needs_whole(tiny_lora(), SimpleNamespace(urls=["http://x"])) is True and told == [[None]], "it asks no server"


@pytest.mark.parametrize("cut", ["attach_weights", "receive_weights"])
def test_what_waits_for_the_trainer_is_not_asked_for_twice_when_its_reply_is_lost(monkeypatch, tmp_path, group, cut):
    """A second such request would wait in a broadcast that nobody sends, until vllm_server_timeout."""
    asked = []

    def post(url, json=None, **how):
        asked.append((json or {}).get("method", url))
        if asked[-1] == cut:
            raise requests.ConnectionError("the connection was cut")
        return SimpleNamespace(status_code=200, text='{"takes_weights":true}', json=lambda: dict(world_size=1))
    monkeypatch.setattr("sync.ask", lambda method, url, **how: post(url, **how))
    monkeypatch.setattr(transport, "open_group", lambda *args: SimpleNamespace(broadcast=lambda *args, **how: None))
    sync = make_sync(tiny_config(output_dir=str(tmp_path), vllm_server_base_url="http://127.0.0.1:9", weight_sync_backend="nccl"), Policy(tiny_lm(), 1.0, "sdpa"), torch.float32)
    with pytest.raises(RuntimeError, match=f"phase '{'connection' if cut == 'attach_weights' else 'update'}' at http://127.0.0.1:9 .it cannot be reached"):
        sync.push(0, Window())
    assert asked.count(cut) == 1


def test_an_odd_answer_is_that_servers_failure_and_leaves_no_healthy_one_paused(monkeypatch, tmp_path, group):
    """503 without a world size once ended the run in a traceback, the other server paused."""
    asked = []

    def ask(method, url, json=None, **how):
        asked.append(url)
        busy = url.startswith("http://127.0.0.2") and url.endswith("/get_world_size")
        return SimpleNamespace(status_code=503 if busy else 200, text='{"takes_weights":true}', json=lambda: dict(error="busy") if busy else dict(world_size=1))
    monkeypatch.setattr("sync.ask", ask)
    monkeypatch.setattr(transport, "open_group", lambda *args: SimpleNamespace(broadcast=lambda *args, **how: None))
    urls = ["http://127.0.0.1:9", "http://127.0.0.2:9"]
    sync = make_sync(tiny_config(output_dir=str(tmp_path), vllm_server_base_url=urls, weight_sync_backend="nccl"), Policy(tiny_lm(), 1.0, "sdpa"), torch.float32)
    sync.push(0, Window())
    assert sync.current == [0] and "http://127.0.0.1:9/resume" in asked and "http://127.0.0.2:9/resume" not in asked


def test_a_server_that_is_back_gets_a_group_of_its_own_anew_at_once(monkeypatch, tmp_path, group):
    """One that was started anew knows nothing of the old one, and after a vain attempt it is not asked again for a while."""
    asked, shared = [], SimpleNamespace(lost=[0, 0], restored=[0, 0])

    def ask(method, url, json=None, **how):
        asked.append((url[:16], (json or {}).get("method")))
        return SimpleNamespace(status_code=200, text='{"takes_weights":true}', json=lambda: dict(world_size=1))
    monkeypatch.setattr("sync.ask", ask)
    monkeypatch.setattr("sync.answers", lambda url: True)
    monkeypatch.setattr(transport, "open_group", lambda *args: SimpleNamespace(broadcast=lambda *args, **how: None))
    config = tiny_config(output_dir=str(tmp_path), vllm_server_base_url=["http://127.0.0.1:9", "http://127.0.0.2:9"], weight_sync_backend="nccl")
    sync = make_sync(config, Policy(tiny_lm(), 1.0, "sdpa"), torch.float32, shared)
    sync.check_back = lambda server: None
    for version in range(4):
        shared.lost[1] += version == 2
        sync.push(version, Window())
    assert sync.current == [0, 1] and [asked.count((url, "attach_weights")) for url in ("http://127.0.0.1", "http://127.0.0.2")] == [1, 2]


def test_the_own_address_is_one_of_the_family_that_the_servers_is_and_ipv4_where_it_has_both(monkeypatch):
    assert own_address("http://127.0.0.1:8000") == own_address("http://localhost:8000") == "127.0.0.1"
    found, sockets = [(socket.AF_INET6, socket.SOCK_DGRAM, 17, "", ("::1", 9, 0, 0))], []

    class Probe:
        def __init__(self, family, kind):
            sockets.append(family)

        __enter__, __exit__ = lambda self: self, lambda self, *error: None

        def connect(self, address):
            self.address = address

        def getsockname(self):
            return self.address
    monkeypatch.setattr(transport.socket, "getaddrinfo", lambda *args, **how: found)
    monkeypatch.setattr(transport.socket, "socket", Probe)
    assert own_address("http://[::1]:8000") == "::1" and sockets == [socket.AF_INET6]


def test_after_an_error_between_chunks_nothing_keeps_the_process_from_its_end(monkeypatch, tmp_path, group):
    """The server waits in the next broadcast, and its reply is waited for in a thread that once outlived the run by vllm_server_timeout."""
    monkeypatch.setattr(transport, "open_group", lambda *args: SimpleNamespace(broadcast=lambda *args, **how: None))
    monkeypatch.setattr(Nccl, "limit", 3000)
    ended, reply = threading.Event(), SimpleNamespace(text='{"takes_weights":true}', json=lambda: dict(world_size=1))
    control = SimpleNamespace(urls=["http://127.0.0.1:9"], timeout=60.0, reply=lambda *args, **how: reply, patience=[1.0],
                              post=lambda server, phase, *args, **how: ended.wait(60) if phase == "update" else "")
    before, nccl = set(threading.enumerate()), Nccl(tiny_config(output_dir=str(tmp_path)), Policy(tiny_lm(), 1.0, "sdpa"), torch.float32, control)
    nccl.stage(0, 1)()
    nccl.begin(0)
    nccl.send(0, 0)
    waiting = [thread for thread in threading.enumerate() if thread not in before and thread.is_alive()]
    assert waiting and nccl.chunks > 1 and all(thread.daemon for thread in waiting)
    ended.set()


def test_chunks_are_cut_where_vllm_cuts_and_aligned_where_asked():
    tensors = [(name, torch.bfloat16, (n,)) for name, n in (("a", 3), ("b", 5), ("c", 40), ("d", 1), ("e", 2))]
    chunks, largest = cut(tensors, 15, 1)
    assert [[(name, offset) for name, _, _, offset in chunk] for chunk in chunks] == [[("a", 0), ("b", 6)], [("c", 0)], [("d", 0), ("e", 2)]] and largest == 80
    assert [offset for _, _, _, offset in cut(tensors, 1000, 16)[0][0]] == [0, 16, 32, 112, 128]


def test_a_shared_buffer_is_refused_beyond_this_machine_and_for_several_servers(tmp_path, group):
    policy = Policy(tiny_lm(), 1.0, "sdpa")
    for urls, words in (("http://10.0.0.7:8000", "10.0.0.7 is refused"), (["http://localhost:1", "http://localhost:2"], "one server")):
        config = tiny_config(output_dir=str(tmp_path), vllm_server_base_url=urls, weight_sync_backend="ipc")
        with pytest.raises(ConfigError, match=words):
            Ipc(config, policy, torch.float32, Control(config.server_urls, 20.0, lambda: None))


def test_a_server_and_a_trainer_that_do_not_fit_one_gpu_are_told_by_how_much():
    """14 bytes for each of 1.54 billion parameters are 20.1 GiB; with the buffer of 2 and 2 for activations 24.1."""
    check_fits(1_543_714_304, 2 << 30, free=25 * 2**30, total=80 * 2**30)
    with pytest.raises(ConfigError, match="20.0 GiB are free.* need 24.1: .*vllm_gpu_memory_utilization lowered by 0.05"):
        check_fits(1_543_714_304, 2 << 30, free=20 * 2**30, total=80 * 2**30)


def test_of_few_trained_parameters_the_buffer_as_it_is_and_what_is_merged_for_it_are_counted_before_it_is_made(monkeypatch):
    """18 million in adapters keep 0.2 GiB; a buffer of 2.4, as much again in merged copies, and 2 for activations are 7.0 in all."""
    ipc = object.__new__(Ipc)
    ipc.device, ipc.trained = torch.device("cuda"), 18_464_768
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(6.9 * 2**30), 80 * 2**30))
    with pytest.raises(ConfigError, match="6.9 GiB are free.* need 7.0"):
        ipc._buffers(int(2.4 * 2**30))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(7.1 * 2**30), 80 * 2**30))
    monkeypatch.setattr(torch, "empty", lambda size, **how: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ipc._buffers(int(2.4 * 2**30))
