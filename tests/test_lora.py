"""LoRA: merged weights out of place, adapters in PEFT's format, versions that outlive the requests which name them."""
import asyncio
import json
import random
from types import SimpleNamespace

import peft
import pytest
import requests
import torch
import torch.distributed as dist
from conftest import make_sample, tensors_of, tiny_config, tiny_lm, tiny_lora

from adapters import Adapters, add_adapters, base_name, check_adapter_server, peft_state, served_rank, takes_adapters, write_adapter
from config import ConfigError
from loss import Objective, policy_loss
from metrics import Window
from model import Policy, make_optimizer, prepare_layers
from naming import NEVER, Naming, adapter_name
from packing import pack_row
from shard import shard
from sync import WeightSync, make_sync
from weights import gathered_weights


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_two_hundred_merged_syncs_leave_the_base_and_the_adapters_bit_identical(group):
    policy = tiny_lora()
    before = {name: p.detach().clone() for name, p in policy.lm.named_parameters()}
    first = gathered_weights(policy, torch.bfloat16)
    for _ in range(200):
        last = gathered_weights(policy, torch.bfloat16)
    assert all(torch.equal(p, before[name]) for name, p in policy.lm.named_parameters()) and all(torch.equal(first[name], last[name]) for name in first)


def test_merged_weights_are_those_of_the_adapted_policy_under_the_base_names(group):
    """W + (alpha / r) B A in float64, and the log-probs of a plain model that loads them."""
    policy, plain = tiny_lora(), tiny_lm()
    sent = gathered_weights(policy, torch.float32)
    names = dict(plain.named_parameters())
    assert sent.keys() < names.keys() and not any("lora" in name or "base_layer" in name for name in sent)
    layer = policy.lm.model.layers[1].mlp.down_proj
    delta = 2.0 * layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    torch.testing.assert_close(sent["model.layers.1.mlp.down_proj.weight"].double(), layer.base_layer.weight.double() + delta, rtol=0, atol=1e-6)
    plain.load_state_dict(sent, strict=False)
    row = tensors_of(pack_row([make_sample(range(3, 20), 4)]))[0]
    with torch.no_grad():
        torch.testing.assert_close(Policy(plain, 1.0, "sdpa")(row)[0], policy(row)[0], rtol=0, atol=1e-4)
        assert (Policy(tiny_lm(), 1.0, "sdpa")(row)[0] - policy(row)[0]).abs().max() > 0.05, "the adapters do something"


def test_a_module_trained_whole_is_sent_under_its_base_name_and_its_untrained_copy_is_not(group):
    policy = tiny_lora(lm=tiny_lm(tied=False), modules_to_save=["lm_head"], target_modules=["q_proj"])
    with torch.no_grad():
        policy.lm.lm_head.modules_to_save["default"].weight += 1.0
    sent = gathered_weights(policy, torch.float32)
    assert torch.equal(sent["lm_head.weight"], policy.lm.lm_head.original_module.weight + 1.0) and "model.embed_tokens.weight" not in sent
    info = dict(lora_config=dict(max_lora_rank=8, max_loras=9), parallel_config=dict(data_parallel_size=1))
    assert not takes_adapters(policy.peft_config, "http://x", info), "an adapter cannot carry it: merged weights are sent"


def test_a_step_moves_the_adapters_and_the_head_named_in_modules_to_save_and_nothing_else():
    policy = tiny_lora(lm=tiny_lm(tied=False), modules_to_save=["lm_head"], target_modules=["q_proj"])
    before, optimizer = {name: p.detach().clone() for name, p in policy.lm.named_parameters()}, make_optimizer(tiny_config(learning_rate=1e-2), policy)
    policy(tensors_of(pack_row([make_sample(range(3, 20), 4)]))[0])[0].sum().backward()
    optimizer.step()
    moved = {name for name, p in policy.lm.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"lm_head.modules_to_save.default.weight", *(name for name in before if ".lora_" in name)}


def test_fused_neighbours_of_an_adapted_layer_are_sent_too(group):
    """A server that reloads part of a fused tensor fills the rest with what lay in memory."""
    sent = gathered_weights(tiny_lora(target_modules=["q_proj"]), torch.float32)
    assert {name.split(".")[-2] for name in sent} == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_an_adapter_in_pefts_format_gives_peft_the_same_logits(tmp_path, group):
    policy, ids = tiny_lora(), torch.arange(3, 20)[None]
    write_adapter(peft_state(policy.lm, torch.float32), policy.peft_config, tmp_path / "adapter", "tiny")
    base = tiny_lm()
    base.config._attn_implementation = policy.lm.config._attn_implementation = "sdpa"
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, policy.lm(input_ids=ids).logits)
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == "tiny" and described["inference_mode"] and described["r"] == 4
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_only_adapters_train_also_with_bf16_copies_and_checkpointing(group, checkpointing):
    """One step moves every adapter's B and nothing else; the gradient is that without checkpointing."""
    def step(checkpointing):
        policy = tiny_lora(std=0.02)
        prepare_layers(policy.lm, checkpointing, False)
        shard(policy, dist.init_device_mesh("cpu", (1,)), torch.bfloat16)
        before = {name: p.detach().clone() for name, p in policy.lm.named_parameters()}
        optimizer = make_optimizer(tiny_config(learning_rate=1e-2), policy)
        row = tensors_of(pack_row([make_sample(range(3, 20), 4)]))[0]
        with policy.compute_weights:
            logprobs, topk, *_ = policy(row)
            policy_loss(Objective(), logprobs, topk, logprobs.detach(), topk.detach(), row["advantages"]).sum().backward()
        optimizer.step()
        return policy, before
    policy, before = step(checkpointing)
    moved = {name for name, p in policy.lm.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if ".lora_A." in name or ".lora_B." in name}
    assert all(p.dtype == (torch.float32 if p.requires_grad else torch.bfloat16) for p in policy.parameters())
    if checkpointing:
        plain, _ = step(False)
        assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), plain.parameters()))


@pytest.mark.parametrize("options,words", [
    (dict(target_modules=["lm_head"]), "lm_head"), (dict(modules_to_save=["lm_head"]), "ties them"), (dict(target_modules=["no_such"]), "does not fit the model"),
    (dict(target_modules=["embed_tokens"]), "embed_tokens"), (dict(target_modules=r".*\.q_proj|.*_head"), "lm_head"), (dict(modules_to_save=["head"]), "ties them"),
    (dict(modules_to_save=["model.embed_tokens"]), "ties them"), (dict(modules_to_save=["no_such"]), "names no_such, of which")])
def test_what_head_or_server_could_not_follow_is_refused_in_a_sentence(options, words):
    with pytest.raises(ConfigError, match=words):
        add_adapters(tiny_lm(), peft.LoraConfig(**(dict(target_modules=["q_proj"]) | options)))


@pytest.mark.parametrize("options", [
    dict(trainable_token_indices=[1, 2]), dict(alora_invocation_tokens=[1, 2], task_type="CAUSAL_LM"), dict(use_dora=True), dict(lora_dropout=0.1), dict(bias="all"),
    dict(bias="lora_only"), dict(lora_bias=True), dict(target_parameters=["q_proj.weight"]), dict(layer_replication=[(0, 2)]), dict(use_qalora=True), dict(ensure_weight_tying=True),
    *(dict(init_lora_weights=start) for start in ("pissa", "pissa_niter_4", "olora"))])
def test_an_option_that_nothing_follows_is_refused_by_its_name_alone(options):
    lm = tiny_lm()
    names = list(dict(lm.named_parameters()))
    with pytest.raises(ConfigError, match=rf"peft_config sets {next(iter(options))}(='{next(iter(options.values()))}')?, which is not supported"):
        add_adapters(lm, peft.LoraConfig(**(dict(target_modules=["q_proj"]) | options)))
    assert list(dict(lm.named_parameters())) == names and all(p.requires_grad for p in lm.parameters()), "refused before anything is done"


@pytest.mark.parametrize("options", [
    dict(), dict(rank_pattern=dict(q_proj=2), alpha_pattern=dict(v_proj=3)), dict(use_rslora=True), dict(layers_to_transform=[1], target_modules=["q_proj"]),
    dict(task_type="CAUSAL_LM"), *(dict(init_lora_weights=start) for start in ("gaussian", "orthogonal", False))])
def test_an_option_that_is_followed_gives_a_server_the_policys_logprobs_over_an_untouched_base(group, options):
    policy, plain, base = tiny_lora(**options), tiny_lm(), tiny_lm().state_dict()
    assert all(torch.equal(p, base[base_name(name)]) for name, p in policy.lm.named_parameters() if base_name(name))
    plain.load_state_dict(gathered_weights(policy, torch.float32), strict=False)
    row = tensors_of(pack_row([make_sample(range(3, 20), 4)]))[0]
    with torch.no_grad():
        torch.testing.assert_close(Policy(plain, 1.0, "sdpa")(row)[0], policy(row)[0], rtol=0, atol=1e-4)


def test_a_server_that_cannot_take_the_adapters_is_told_how_to_be_restarted():
    config = peft.LoraConfig(r=12, rank_pattern={"q_proj": 24})
    server = dict(lora_config=dict(max_lora_rank=16, max_loras=9), parallel_config=dict(data_parallel_size=1))
    with pytest.raises(ConfigError, match="--max-lora-rank 16, peft_config needs 24: restart it with --max-lora-rank 32"):
        check_adapter_server(config, 4, "http://x", server)
    server["lora_config"] = dict(max_lora_rank=32, max_loras=5)
    with pytest.raises(ConfigError, match="restart it with --max-loras 6"):
        check_adapter_server(config, 4, "http://x", server)
    check_adapter_server(config, 3, "http://x", server)
    assert takes_adapters(config, "http://x", server) and not takes_adapters(config, "http://x", server | dict(lora_config=None))
    assert not takes_adapters(config, "http://x", server | dict(parallel_config=dict(data_parallel_size=2)))


def test_a_server_of_several_api_processes_is_told_to_be_one_because_each_registers_adapters_on_its_own():
    server = dict(lora_config=dict(max_lora_rank=16, max_loras=9), parallel_config=dict(data_parallel_size=1, _api_process_count=8))
    with pytest.raises(ConfigError, match="http://x has 8 API processes.*: restart it with --api-server-count 1"):
        check_adapter_server(peft.LoraConfig(), 4, "http://x", server)
    server["parallel_config"]["_api_process_count"] = 1
    check_adapter_server(peft.LoraConfig(), 4, "http://x", server)


def test_adapters_are_not_put_over_the_weights_of_another_run_but_over_a_checkpoints_and_after_other_adapters():
    server = dict(lora_config=dict(max_lora_rank=16, max_loras=9), parallel_config=dict(data_parallel_size=1))
    for said in (None, "default", "adapters"):
        check_adapter_server(peft.LoraConfig(), 4, "http://x", server, said)
    with pytest.raises(ConfigError, match="http://x has the weights of another run under the adapters .*'300'.*: start it again"):
        check_adapter_server(peft.LoraConfig(), 4, "http://x", server, "300")


A, B = "http://127.0.0.1:1", "http://127.0.0.2:2"
TAKES = dict(lora_config=dict(max_lora_rank=16, max_loras=9), parallel_config=dict(data_parallel_size=1), model_config=dict(dtype="torch.float32", logprobs_mode="processed_logprobs", max_logprobs=20))


def answering(monkeypatch, infos, versions, hung=()):
    """Servers, by url, with their vllm_config and weight version; the engine of a `hung` one never answers. Returns what was asked: (url, path, seconds waited for at most)."""
    asked = []

    def ask(method, url, timeout=None, **how):
        server, path = url[:18], url[18:].split("?")[0]
        asked.append((server, path, timeout[1] if isinstance(timeout, tuple) else timeout))
        if server in hung and path not in ("/health", "/v1/models", "/server_info"):
            raise requests.ReadTimeout("the engine waits in a broadcast")
        body = {"/v1/models": dict(data=[dict(id="tiny", max_model_len=128)]), "/server_info": dict(vllm_config=infos[server]), "/weight_info": dict(weight_version=versions[server])}.get(path, {})
        return SimpleNamespace(status_code=200, text=json.dumps(body), json=lambda: body)
    monkeypatch.setattr("sync.ask", ask)
    monkeypatch.setattr("serve.ask", ask)
    return asked


def synced(tmp_path, urls, backend="disk", **options):
    shared = SimpleNamespace(lost=[0] * len(urls), restored=[0] * len(urls), adapters=SimpleNamespace(value=0), oldest_named=SimpleNamespace(value=NEVER))
    return make_sync(tiny_config(output_dir=str(tmp_path), vllm_server_base_url=urls, weight_sync_backend=backend), tiny_lora(**options), torch.float32, shared)


@pytest.mark.parametrize("urls", [[A, B], [B, A]])
@pytest.mark.parametrize("version", ["default", "7"])
@pytest.mark.parametrize("processes", [1, 8])
def test_where_one_server_takes_no_adapters_merged_weights_go_to_all_and_none_is_refused_whatever_the_order(tmp_path, group, monkeypatch, urls, version, processes):
    with_adapters = TAKES | dict(parallel_config=dict(data_parallel_size=1, _api_process_count=processes))
    asked = answering(monkeypatch, {A: with_adapters, B: TAKES | dict(lora_config=None)}, {A: version, B: version})
    assert not synced(tmp_path, urls).names_adapters and not any(path == "/weight_info" for _, path, _ in asked), "no engine is needed to tell"
    answering(monkeypatch, {A: with_adapters, B: TAKES}, {A: version, B: version})
    if (version, processes) == ("default", 1):
        assert synced(tmp_path, urls).names_adapters
    else:
        with pytest.raises(ConfigError, match="start it again|restart it with --api-server-count 1"):
            synced(tmp_path, urls)


def test_a_run_of_adapters_ends_at_its_start_in_a_sentence_where_the_engine_waits_in_another_trainers_broadcast(tmp_path, group, monkeypatch):
    asked = answering(monkeypatch, {A: TAKES}, {A: "default"}, hung={A})
    with pytest.raises(ConfigError, match=f"{A} did not answer /weight_info.*was killed: start it again"):
        synced(tmp_path, [A])
    assert asked[-1] == (A, "/weight_info", 120.0)


def test_a_server_out_of_use_whose_engine_hangs_is_waited_for_ten_seconds_an_answer(tmp_path, group, monkeypatch):
    """The others, which may serve on, were once kept from new weights for up to vllm_server_timeout."""
    hung = set()
    asked = answering(monkeypatch, {A: TAKES, B: TAKES}, {A: "default", B: "adapters"}, hung)
    sync = synced(tmp_path, [A, B])
    sync.push(0, Window())
    assert sync.current == [0, 1]
    hung.add(B)
    sync.shared.lost[1] = 1
    asked.clear()
    sync.push(1, Window())
    waited = [(path, seconds) for server, path, seconds in asked if server == B]
    assert sync.current == [0] and waited[-1] == ("/weight_info", 10.0) and all(seconds <= 10.0 for _, seconds in waited)


def test_ranks_are_rounded_up_to_those_vllm_has_buffers_for():
    assert [served_rank(rank) for rank in (1, 2, 8, 9, 33, 257, 512)] == [1, 8, 8, 16, 64, 320, 512]
    with pytest.raises(ConfigError, match="at most 512"):
        served_rank(513)


class LoraServer:
    """Keeps the loaded names; what a request names must be loaded from its start to its end."""

    def __init__(self):
        self.loaded, self.most, self.wrong = set(), 0, []

    def post(self, server, phase, path, body=None, optional=False, within=None):
        if "unload" in path:
            self.loaded.discard(body["lora_name"])
        elif "load" in path:
            assert (tmp := body["lora_path"]) and json.loads(open(f"{tmp}/adapter_config.json").read())
            self.loaded.add(body["lora_name"])
        self.most = max(self.most, len(self.loaded))


def test_an_adapter_whose_loading_was_asked_for_twice_is_loaded(tmp_path, group):
    """The reply to the first request was lost on its way; a name that is refused for another reason ends the sync."""
    shared, words = SimpleNamespace(adapters=SimpleNamespace(value=0), oldest_named=SimpleNamespace(value=NEVER), lost=[0], restored=[0]), "The lora adapter 'policy-v0' has already been loaded."

    def post(server, phase, path, body=None, optional=False, within=None):
        if path == "/v1/load_lora_adapter":
            raise RuntimeError(f"weight sync failed in its phase 'load of the adapter' at http://x (400: {words})")
    control = SimpleNamespace(urls=["http://x"], post=post, retries=0, patience=[0])
    sync = WeightSync(Adapters(tiny_config(output_dir=str(tmp_path)), tiny_lora(), torch.float32, control, shared), control, shared)
    sync.push(0, Window())
    assert sync.current == [0] and sync.transport.loaded == [{0}]
    words = "no adapter found"
    with pytest.raises(RuntimeError, match="no adapter found"):
        sync.push(1, Window())


def test_a_server_that_is_dead_for_good_keeps_no_adapters_on_the_disk(tmp_path, group):
    policy, healthy = tiny_lora(), LoraServer()
    shared = SimpleNamespace(adapters=SimpleNamespace(value=0), oldest_named=SimpleNamespace(value=NEVER), lost=[0, 0], restored=[0, 0])

    def post(server, *args, **how):
        if server == 1 and shared.lost[1]:
            raise RuntimeError("it cannot be reached")
        healthy.post(server, *args, **how)
    control = SimpleNamespace(urls=["http://a", "http://127.0.0.1:9"], post=post, retries=0, patience=[0, 0])
    sync = WeightSync(Adapters(tiny_config(output_dir=str(tmp_path), max_staleness=2), policy, torch.float32, control, shared), control, shared)
    for version in range(20):
        shared.lost[1] = int(version >= 5)
        sync.push(version, Window())
    assert {folder.name for folder in (tmp_path / ".vllm_lora").iterdir()} == {adapter_name(v) for v in range(16, 20)} and sync.current == [0]


def test_no_request_ever_names_an_adapter_that_is_not_loaded_whatever_the_latencies(tmp_path, group):
    """Requests start under the current version and take up to ten syncs; two versions of staleness are kept."""
    policy, server, rng = tiny_lora(), LoraServer(), random.Random(0)
    shared = SimpleNamespace(adapters=SimpleNamespace(value=0), oldest_named=SimpleNamespace(value=NEVER), lost=[0], restored=[0])
    control = SimpleNamespace(urls=["http://x"], post=server.post, retries=0, patience=[0])
    sync = WeightSync(Adapters(tiny_config(output_dir=str(tmp_path), max_staleness=2), policy, torch.float32, control, shared), control, shared)
    naming, version, named = Naming("base", shared.adapters, shared.oldest_named), [0], []

    async def request(duration):
        with naming(version[0]) as model:
            named.append(model)
            for _ in range(duration):
                server.wrong += [model] if model not in server.loaded else []
                await asyncio.sleep(0)

    async def run():
        sync.push(0, Window())
        tasks = []
        for v in range(1, 31):
            tasks += [asyncio.ensure_future(request(rng.choice([1, 2, 5, 40]))) for _ in range(3)]
            for _ in range(4):
                await asyncio.sleep(0)
            sync.push(v, Window())
            version[0] = v
        await asyncio.gather(*tasks)
    asyncio.run(run())
    sync.push(31, Window())
    assert not server.wrong and "base" not in named and len(set(named)) > 20
    assert server.loaded == {adapter_name(v) for v in (29, 30, 31)}, "max_staleness + 1 versions stay"
    assert 4 < server.most < 20 and shared.oldest_named.value == NEVER
    assert len(list((tmp_path / ".vllm_lora").iterdir())) <= 5
