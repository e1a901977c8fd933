"""The server command follows the config, and a server that does not is refused with one sentence."""
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import requests
from conftest import ROOT, tiny_config
from peft import LoraConfig

from config import ConfigError
from flags import cpu_threads, server_command
from serve import Server, aside, ask, check_server, wait_for_server
from sync import Control


def flags(config):
    argv, environment = server_command(config)
    return {key: value for key, value in zip(argv, [*argv[1:], ""]) if key.startswith("--")}, argv, environment


def test_every_flag_that_could_disagree_with_the_trainer_comes_from_the_config():
    config = tiny_config(model="m", vllm_server_base_url="http://127.0.0.1:8111", vllm_max_model_length=640, num_sampler_logprobs=30, seed=7)
    got, argv, environment = flags(config)
    wanted = {"--model": "m", "--host": "127.0.0.1", "--port": "8111", "--dtype": "float32", "--max-model-len": "640", "--seed": "7",
              "--logprobs-mode": "processed_logprobs", "--max-logprobs": "31", "--generation-config": "vllm", "--scheduler-cls": "vllm_scheduler.scheduler"}
    assert {key: got[key] for key in wanted} == wanted and "--enforce-eager" in argv and "--enable-scale-out" in argv
    assert argv[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    assert environment.pop("PYTHONPATH").split(":")[0] == str(ROOT), "where the scheduler is found"
    assert environment == {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "2", "OMP_NUM_THREADS": str(cpu_threads())}


def test_each_way_of_the_weights_brings_its_flags(monkeypatch):
    base = dict(vllm_server_base_url="http://127.0.0.1:8111")
    for backend in ("nccl", "ipc"):
        got, _, environment = flags(tiny_config(weight_sync_backend=backend, **base))
        assert got["--worker-extension-cls"] == "vllm_worker.CopyPlan" and environment["PYTHONPATH"].split(":")[0] == str(ROOT) and "--weight-transfer-config" not in got
    got, _, environment = flags(tiny_config(peft_config=LoraConfig(r=9, rank_pattern={"q_proj": 20}), vllm_enable_lora=True, max_staleness=4, **base))
    assert got["--max-lora-rank"] == "32" and got["--max-loras"] == "6" and "--enable-lora" in got and environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    monkeypatch.setattr("flags.device_type", lambda config: "cuda")
    assert flags(tiny_config(weight_sync_backend="nccl", **base))[0]["--weight-transfer-config"] == '{"backend": "nccl"}'
    for changes, share, processes in ((dict(), None, "8"), (dict(weight_sync_backend="ipc"), "0.35", "8"), (dict(weight_sync_backend="ipc", vllm_gpu_memory_utilization=0.5), "0.5", "8"),
                                      (dict(peft_config=LoraConfig(), vllm_enable_lora=True), None, "1")):
        got = flags(tiny_config(**changes, **base))[0]
        assert got.get("--gpu-memory-utilization") == share and got["--api-server-count"] == processes


def test_a_chat_template_of_the_config_is_the_servers_to_the_letter_and_without_one_it_keeps_the_models():
    from chat_templates import DEEPSEEK
    from vllm.renderers.chat_utils import load_chat_template
    got = flags(tiny_config(chat_template_kwargs=dict(chat_template=DEEPSEEK)))[0]
    assert load_chat_template(got["--chat-template"]) == DEEPSEEK and "｜" in DEEPSEEK and "\\n" in DEEPSEEK
    for other in (None, dict(enable_thinking=False), dict(chat_template="tool_use")):
        assert "--chat-template" not in flags(tiny_config(chat_template_kwargs=other))[1]


def test_the_servers_dtype_is_the_trainers_compute_dtype():
    assert [flags(tiny_config(**changes))[0]["--dtype"] for changes in (dict(), dict(bf16=True), dict(fp16=True, bf16=None), dict(dtype="bfloat16"))] == [
        "float32", "bfloat16", "float16", "bfloat16"]


def test_serve_prints_the_command_it_would_run():
    run = subprocess.run([sys.executable, "serve.py", "configs/smollm_cpu.py", "vllm_max_model_length=99", "bf16=false", "--print"],
                         cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0 and run.stdout.startswith("VLLM_SERVER_DEV_MODE=1 ") and "--max-model-len 99 " in run.stdout and "--dtype float32" in run.stdout


class FakeVllm(BaseHTTPRequestHandler):
    model = dict(id="m", root="m", max_model_len=256)
    served = dict(dtype="torch.float32", logprobs_mode="processed_logprobs", max_logprobs=20)
    missing, pages = (), {}

    def do_GET(self):
        path = self.path.split("?")[0]
        body = {"/health": {}, "/v1/models": dict(data=[self.model]), "/server_info": dict(vllm_config=dict(model_config=self.served))}.get(path)
        self.send_response(404 if body is None or path in self.missing else 200)
        self.end_headers()
        self.wfile.write(self.pages.get(path) or json.dumps(body).encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def fake_vllm():
    servers = []

    def start(**changes):
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (FakeVllm,), changes))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return tiny_config(model="m", vllm_max_model_length=256, vllm_server_base_url=f"http://127.0.0.1:{server.server_port}")
    yield start
    for server in servers:
        server.shutdown()


def test_a_matching_server_gives_its_length(fake_vllm):
    config = fake_vllm()
    assert check_server(config, config.server_urls[0]) == 256


@pytest.mark.parametrize("changes,words", [
    (dict(model=dict(id="other", root="other", max_model_len=256)), ("serves other", "config says m")),
    (dict(model=dict(id="my-policy", root="m", max_model_len=256)), ("serves my-policy", "config says m")),
    (dict(model=dict(id="m", max_model_len=512)), ("max_model_len 512", "says 256")),
    (dict(served=FakeVllm.served | dict(dtype="torch.bfloat16")), ("dtype torch.bfloat16", "says torch.float32")),
    (dict(served=FakeVllm.served | dict(logprobs_mode="raw_logprobs")), ("logprobs_mode raw_logprobs", "says processed_logprobs")),
    (dict(served=FakeVllm.served | dict(max_logprobs=8)), ("max_logprobs 8", "num_sampler_logprobs=8")),
    (dict(missing=("/server_info",)), ("VLLM_SERVER_DEV_MODE=1",)),
    (dict(missing=("/v1/models",)), ("not a vLLM server",)),
])
def test_a_server_that_serves_something_else_is_refused_with_both_values_and_what_to_run(fake_vllm, changes, words):
    with pytest.raises(ConfigError) as caught:
        config = fake_vllm(**changes)
        check_server(config, config.server_urls[0])
    assert all(word in str(caught.value) for word in (*words, "vllm_server_base_url" if "/v1/models" in changes.get("missing", ()) else "python serve.py"))


def test_a_server_without_a_limit_on_logprobs_has_enough_of_them(fake_vllm):
    config = fake_vllm(served=FakeVllm.served | dict(max_logprobs=-1))
    assert check_server(config, config.server_urls[0]) == 256


@pytest.mark.parametrize("path,words", [("/v1/models", "is not a vLLM server (GET /v1/models answered '<html>starting</html>')"), ("/server_info", "does not offer /server_info (it answered '<html>starting</html>')")])
def test_a_page_in_place_of_json_is_a_sentence_and_no_traceback(fake_vllm, path, words):
    with pytest.raises(ConfigError) as caught:
        config = fake_vllm(pages={path: b"<html>starting</html>"})
        check_server(config, config.server_urls[0])
    assert words in str(caught.value)


def test_a_server_that_could_return_candidate_sets_but_was_not_told_to_is_refused_where_they_are_needed(fake_vllm, monkeypatch):
    """vLLM refuses the flag on a CPU, and an older one does not know it: there a warning comes with the first reply."""
    config = replace(fake_vllm(served=FakeVllm.served | dict(return_sampling_mask=False)), top_k=5)
    assert check_server(config, config.server_urls[0]) == 256
    monkeypatch.setattr("serve.device_type", lambda config: "cuda")
    with pytest.raises(ConfigError, match="without --return-sampling-mask, which top_k, top_p and min_p need: restart it with"):
        check_server(config, config.server_urls[0])
    assert check_server(replace(config, top_k=0), config.server_urls[0]) == 256
    known = replace(config, vllm_server_base_url=fake_vllm(served=FakeVllm.served | dict(return_sampling_mask=True)).server_urls[0])
    older = replace(config, vllm_server_base_url=fake_vllm().server_urls[0])
    assert check_server(known, known.server_urls[0]) == check_server(older, older.server_urls[0]) == 256


def test_a_server_that_never_answers_ends_the_wait_in_a_sentence(capsys):
    started = time.monotonic()
    with pytest.raises(ConfigError, match="no vLLM server answered at http://127.0.0.1:9 within vllm_server_timeout=1 s"):
        wait_for_server(tiny_config(vllm_server_base_url="http://127.0.0.1:9", vllm_server_timeout=1), None)
    assert time.monotonic() - started < 20 and "python serve.py" in capsys.readouterr().out


def test_an_owned_server_that_dies_at_start_is_reported_with_the_end_of_its_log(tmp_path):
    config = tiny_config(model=str(tmp_path / "missing"), vllm_server_base_url="http://127.0.0.1:8197", output_dir=str(tmp_path))
    server = Server(config)
    try:
        with pytest.raises(ConfigError, match="the vLLM server exited with code"):
            wait_for_server(config, server)
    finally:
        server.stop()


def test_a_server_owned_by_a_worker_of_torchrun_makes_its_own_process_group(tmp_path, monkeypatch):
    """vLLM up to 0.26 opens its group's store by an address; told that torchrun's agent keeps the store, it would wait for one that nobody opens."""
    for name, value in dict(TORCHELASTIC_USE_AGENT_STORE="True", RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1").items():
        monkeypatch.setenv(name, value)
    program = ("import os, sys; from datetime import timedelta; import torch.distributed as dist\n"
               "dist.init_process_group('gloo', init_method='tcp://127.0.0.1:8196', world_size=1, rank=0, timeout=timedelta(seconds=5))\n"
               "sys.exit('RANK' in os.environ or os.environ['EXTRA'] != 'kept' or 'PATH' not in os.environ)")
    monkeypatch.setattr("serve.server_command", lambda config: ([sys.executable, "-c", program], dict(EXTRA="kept")))
    server = Server(tiny_config(vllm_server_base_url="http://127.0.0.1:9", output_dir=str(tmp_path)))
    assert server.process.wait(60) == 0, server.log.read_text()


def test_a_proxy_of_the_environment_is_not_asked_for_the_servers(fake_vllm, monkeypatch):
    """The rollouts' requests ignore it too."""
    config = fake_vllm()
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert check_server(config, config.server_urls[0]) == 256 and Control(config.server_urls, 60.0, lambda: None).reply(0, "/health").status_code == 200


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_no_proxy_of_the_environment_is_asked_and_its_certificates_count_and_it_stays_as_it_is(monkeypatch, scheme):
    """no_proxy="*" would do both, but requests writes it into the environment meanwhile: of two threads one found it gone, or left it there."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/own/authority.pem")
    sent, settings = [], []

    def send(self, request, proxies=None, verify=None, **how):
        sent.append((requests.utils.select_proxy(request.url, proxies) or None, verify))
        return SimpleNamespace(is_redirect=False, headers={}, history=[], raw=None, content=b"", elapsed=None, cookies={}, status_code=200)
    monkeypatch.setattr(requests.sessions, "extract_cookies_to_jar", lambda *args: None)
    monkeypatch.setattr(requests.Session, "resolve_redirects", lambda *args, **how: iter(()))
    monkeypatch.setattr(requests.adapters.HTTPAdapter, "send", send)
    monkeypatch.setattr(type(os.environ), "__setitem__", lambda *args: settings.append(args))
    ask("GET", f"{scheme}://server:8000/health")
    assert sent == [(None, "/own/authority.pem")] and not settings


def test_whatever_ends_a_thread_reaches_who_waits_for_it():
    def leave():
        raise SystemExit("an exit in a thread")
    with pytest.raises(SystemExit, match="an exit in a thread"):
        aside(leave).result(timeout=20)


def test_a_port_in_use_is_not_taken_for_our_own_server(fake_vllm, tmp_path):
    with pytest.raises(ConfigError, match="something already answers"):
        Server(replace(fake_vllm(), output_dir=str(tmp_path)))


def test_a_server_to_be_started_needs_a_port_in_its_address():
    """It once listened at 8000 while the trainer asked port 80 for 30 minutes."""
    with pytest.raises(ConfigError, match="names no port, .* write http://localhost:8000"):
        server_command(tiny_config(vllm_server_base_url="http://localhost"))
