"""Names and defaults are those of the specification; whatever the user can put right is one sentence that names the option."""
import ast
import dataclasses
import inspect
import pickle
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
from conftest import ROOT, tiny_config

from config import Config, ConfigError, load_config

OWN = dict(
    model_init_kwargs=None, dtype="float32", trust_remote_code=False, router_aux_loss_coef=None, num_generations=8,
    max_completion_length=2048, temperature=1.0, top_p=1.0, top_k=0, min_p=None, chat_template_kwargs=None,
    max_tool_calling_iterations=None, vllm_server_base_url="http://localhost:8000", vllm_server_timeout=1800.0, epsilon=0.2,
    epsilon_high=None, score_centering=True, vllm_importance_sampling_clip_min=0.5, vllm_importance_sampling_clip_max=5.0,
    num_sampler_logprobs=8, token_budget=None, max_concurrent_rollouts=512, max_staleness=4, weight_sync_steps=1,
    rollout_worker_timeout=300.0, log_completions=False, num_completions_to_print=None)
INHERITED = dict(
    output_dir=None, num_train_epochs=3.0, max_steps=-1, learning_rate=1e-06, lr_scheduler_type="constant", lr_scheduler_kwargs=None,
    warmup_steps=0, optim="adamw_torch_fused", weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-08,
    gradient_accumulation_steps=1, max_grad_norm=1.0, bf16=None, fp16=False, tf32=None, gradient_checkpointing=True,
    gradient_checkpointing_kwargs=None, torch_compile=False, logging_steps=1, logging_first_step=False, disable_tqdm=None, report_to="none",
    run_name=None, project="huggingface", save_strategy="steps", save_steps=500, save_total_limit=None, save_only_model=False,
    resume_from_checkpoint=None, push_to_hub=False, hub_token=None, hub_private_repo=None, hub_model_id=None, hub_strategy="every_save",
    hub_revision=None, eval_steps=None, eval_delay=0, eval_on_start=False, full_determinism=False, seed=42, data_seed=None, use_cpu=False, ddp_timeout=1800)
DEFAULTS = {field.name: field.default for field in dataclasses.fields(Config)}

FILE = """
from config import Config
def length_times(factor):
    return lambda completions, **columns: [factor * len(c) for c in completions]


config = Config(model="tiny", reward_funcs=length_times(2.0))
"""


def write(folder, text=FILE, name="my_run.py"):
    path = folder / name
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", sorted((OWN | INHERITED).keys() & DEFAULTS.keys()))
def test_an_option_has_the_default_of_the_specification(name):
    assert DEFAULTS[name] == (OWN | INHERITED)[name]


EVERY_OPTION = """
    output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps optim
    optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon optim_target_modules gradient_accumulation_steps
    average_tokens_across_devices max_grad_norm label_smoothing_factor bf16 fp16 bf16_full_eval fp16_full_eval tf32 gradient_checkpointing
    gradient_checkpointing_kwargs torch_compile torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config use_cache
    neftune_noise_alpha torch_empty_cache_steps auto_find_batch_size logging_strategy logging_steps logging_first_step log_on_each_node
    logging_nan_inf_filter include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to run_name project
    trackio_space_id trackio_bucket_id trackio_static_space_id eval_strategy eval_steps eval_delay per_device_eval_batch_size
    prediction_loss_only eval_on_start eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics
    batch_eval_metrics save_only_model save_strategy save_steps save_on_each_node save_total_limit enable_jit_checkpoint push_to_hub
    hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision load_best_model_at_end metric_for_best_model
    greater_is_better ignore_data_skip restore_callback_states_from_checkpoint full_determinism seed data_seed use_cpu accelerator_config
    parallelism_config dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
    dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names
    train_sampling_strategy length_column_name ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph
    ddp_backend ddp_timeout fsdp fsdp_config deepspeed debug skip_memory_metrics do_train do_eval do_predict resume_from_checkpoint
    local_rank model_init_kwargs dtype trust_remote_code router_aux_loss_coef num_generations max_completion_length temperature top_p top_k
    min_p chat_template_kwargs max_tool_calling_iterations vllm_server_base_url vllm_server_timeout epsilon epsilon_high score_centering
    vllm_importance_sampling_clip_min vllm_importance_sampling_clip_max num_sampler_logprobs token_budget max_concurrent_rollouts
    max_staleness weight_sync_steps rollout_worker_timeout log_completions num_completions_to_print
"""


@pytest.mark.parametrize("name", EVERY_OPTION.split())
def test_every_option_of_the_specification_is_here_or_named_in_the_readme_as_left_out(name):
    paragraph, = re.findall(r"^Left out[^\n]*(?:\n[^\n]+)*", (ROOT / "README.md").read_text(), re.M)
    assert (name in DEFAULTS) != any(fnmatch(name, pattern) for pattern in re.findall(r"`([^`]+)`", paragraph))


@pytest.mark.parametrize("text, name, value", [
    ("num_generations=4", "num_generations", 4), ("--num_generations=4", "num_generations", 4), ("max_steps=-1", "max_steps", -1),
    ("learning_rate=3e-5", "learning_rate", 3e-5), ("temperature=1", "temperature", 1.0), ("min_p=0.0", "min_p", 0.0),
    ("score_centering=false", "score_centering", False), ("score_centering=True", "score_centering", True), ("bf16=0", "bf16", False),
    ("bf16=none", "bf16", None), ("epsilon_high=None", "epsilon_high", None), ("token_budget=4096", "token_budget", 4096),
    ("model_init_kwargs={'a': 1, 'b': None}", "model_init_kwargs", {"a": 1, "b": None}),
    ("model_init_kwargs=None", "model_init_kwargs", None), ('chat_template_kwargs={"enable_thinking": false, "n": null}', "chat_template_kwargs", dict(enable_thinking=False, n=None)),
    ("logging_steps=5", "logging_steps", 5.0),
    ("model=org/name=1", "model", "org/name=1"), ("report_to=none", "report_to", "none"), ("run_name=none", "run_name", None),
    ("output_dir=/tmp/x", "output_dir", "/tmp/x"), ("train_dataset=data/train.jsonl", "train_dataset", "data/train.jsonl"),
    ("resume_from_checkpoint=true", "resume_from_checkpoint", True), ("resume_from_checkpoint=runs/x/checkpoint-4", "resume_from_checkpoint", "runs/x/checkpoint-4"),
    ("save_steps=2", "save_steps", 2.0), ("train_dataset=trl-lib/DeepMath-103K", "train_dataset", "trl-lib/DeepMath-103K")])
def test_an_override_is_parsed_by_the_declared_type(tmp_path, text, name, value):
    got = getattr(load_config([write(tmp_path), text]), name)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize("text, words", [
    ("learning_rat=1e-5", "unknown option 'learning_rat': did you mean 'learning_rate'?"), ("num_generation=4", "'num_generations'"),
    ("qqqq=1", "unknown option 'qqqq'"), ("learning_rate", "write key=value"),
    ("num_generations=eight", "num_generations=eight: the value must be int."), ("num_generations=8.5", "num_generations=8.5"),
    ("learning_rate=fast", "learning_rate=fast: the value must be float."), ("bf16=maybe", "bf16=maybe: the value must be bool."),
    ("learning_rate=none", "learning_rate=none"), ("chat_template_kwargs=[1]", "chat_template_kwargs=[1]: the value must be dict."),
    ("chat_template_kwargs=x", "chat_template_kwargs=x: the value must be dict."),
    ("reward_funcs=my_reward", "set functions in the config file"),
    ("num_generations=1", "num_generations=1 must be at least 2."), ("top_p=nan", "top_p=nan")])
def test_a_bad_override_is_one_sentence(tmp_path, text, words):
    with pytest.raises(ConfigError) as caught:
        load_config([write(tmp_path), text])
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name, text, words", [
    (None, None, "missing.py is not a"), ("empty.py", "x = 1", "must bind `config = Config("), ("dict.py", "config = {}", "must bind"),
    ("notes.txt", FILE, "notes.txt")])
def test_a_path_that_is_no_config_is_one_sentence(tmp_path, name, text, words):
    path = write(tmp_path, text, name) if name else str(tmp_path / "missing.py")
    with pytest.raises(ConfigError) as caught:
        load_config([path])
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [FILE.replace("model=", "modle="), FILE + "from dataclasses import replace\nconfig = replace(config, modle=3)"])
def test_an_unknown_option_in_a_config_file_is_named_with_the_nearest(tmp_path, text):
    with pytest.raises(ConfigError, match="my_run.py: unknown option 'modle': did you mean 'model'?"):
        load_config([write(tmp_path, text)])


def test_a_subclass_that_is_not_frozen_is_one_sentence(tmp_path):
    text = "from dataclasses import dataclass\nfrom config import Config\n{}\nclass Mine(Config):\n    cap: float = 0.9\nconfig = Mine(model='m', reward_funcs=len)\n"
    with pytest.raises(ConfigError, match=r"my_run.py: .* write @dataclass\(frozen=True\)"):
        load_config([write(tmp_path, text.format("@dataclass"))])
    assert load_config([write(tmp_path, text.format("@dataclass(frozen=True)")), "cap=0.5"]).cap == 0.5


def test_another_error_of_a_config_file_stays_what_it_is(tmp_path):
    with pytest.raises(TypeError, match="unsupported operand"):
        load_config([write(tmp_path, "1 + ''")])


def test_a_parsers_name_needs_no_quotes(tmp_path):
    assert load_config([write(tmp_path), "tool_parser=hermes"]).tool_parser == "hermes"


def test_no_argument_shows_the_usage():
    with pytest.raises(ConfigError, match="train.py configs/x.py"):
        load_config([])


@pytest.mark.parametrize("changes, named", [
    (dict(model=""), "model"), (dict(model=7), "model"), (dict(reward_funcs=None), "reward_funcs"), (dict(reward_funcs=[]), "reward_funcs"),
    (dict(reward_funcs="accuracy"), "reward_funcs"), (dict(reward_funcs=[len, 3]), "reward_funcs"),
    (dict(num_generations=1), "num_generations=1"), (dict(max_completion_length=0), "max_completion_length=0"),
    (dict(num_sampler_logprobs=0), "num_sampler_logprobs=0"), (dict(max_concurrent_rollouts=0), "max_concurrent_rollouts=0"),
    (dict(weight_sync_steps=0), "weight_sync_steps=0"), (dict(gradient_accumulation_steps=0), "gradient_accumulation_steps=0"),
    (dict(logging_steps=0), "logging_steps=0"), (dict(max_staleness=-1), "max_staleness=-1"), (dict(top_k=-1), "top_k=-1"),
    (dict(temperature=0.009), "temperature=0.009"), (dict(temperature=float("nan")), "temperature=nan"), (dict(top_p=0.0), "top_p=0.0"),
    (dict(top_p=1.01), "top_p=1.01"), (dict(min_p=-0.1, top_k=5), "min_p=-0.1"), (dict(min_p=1.1, top_k=5), "min_p=1.1"),
    (dict(top_p=0.9), "top_k"), (dict(min_p=0.1), "top_k"),
    (dict(vllm_importance_sampling_clip_min=1.1), "vllm_importance_sampling_clip_min=1.1"),
    (dict(vllm_importance_sampling_clip_min=-0.1), "vllm_importance_sampling_clip_min=-0.1"),
    (dict(vllm_importance_sampling_clip_max=0.9), "_max=0.9"), (dict(loss_normalization="token"), "loss_normalization='token'"),
    (dict(weight_sync_backend="pigeon"), "weight_sync_backend='pigeon'"), (dict(attention_backend="eager"), "attention_backend='eager'"),
    (dict(optim="lion"), "optim='lion'"), (dict(dtype="int8"), "dtype='int8'"), (dict(bf16=True, fp16=True), "bf16 and fp16"),
    (dict(report_to="printer"), "report_to='printer'"), (dict(token_budget=0), "token_budget=0"),
    (dict(num_train_epochs=0), "num_train_epochs"),
    (dict(logging_steps=0.1), "logging_steps=0.1"), (dict(model_init_kwargs=dict(torch_dtype="bfloat16")), "torch_dtype"),
    (dict(model_init_kwargs=dict(attn_implementation="sdpa")), "attention_backend"), (dict(model_init_kwargs=dict(dtype="int8")), "dtype='int8'"),
    (dict(model_init_kwargs=dict(dtype="float16")), "dtype='float16'"), (dict(save_steps=0), "save_steps=0"), (dict(save_steps=0.1), "save_steps=0.1"),
    (dict(save_strategy="best"), "save_strategy='best'"), (dict(hub_strategy="checkpoint"), "hub_strategy='checkpoint'"),
    (dict(eval_steps=2), "eval_dataset"), (dict(eval_on_start=True), "eval_dataset"), (dict(eval_num_generations=0), "eval_num_generations=0"),
    (dict(eval_dataset=[], eval_steps=0.5), "eval_steps=0.5"), (dict(replay="rollouts"), "token_budget"),
    (dict(replay="rollouts", token_budget=9, save_rollouts=True), "save_rollouts"),
    (dict(replay="run/rollouts", token_budget=9, output_dir="run"), "replay=run/rollouts lies in output_dir"), (dict(dtype="float16"), "dtype='float16'"),
    (dict(lr_scheduler_type="linear"), "lr_scheduler_type='linear'"), (dict(warmup_steps=3), "warmup_steps"),
    (dict(warmup_steps=0.1, lr_scheduler_type="constant_with_warmup"), "warmup_steps below 1"),
    *((dict([pair]), "{}={}".format(*pair)) for pair in dict(
        learning_rate=-1.0, weight_decay=-0.1, adam_epsilon=-1.0, max_grad_norm=-1.0, warmup_steps=-1, epsilon=-0.2, epsilon_high=-1.0, save_total_limit=-1,
        num_completions_to_print=-1, router_aux_loss_coef=-1.0, vllm_max_model_length=0, ddp_timeout=0, rollout_worker_timeout=-1.0, vllm_server_timeout=0.0,
        adam_beta1=1.0, adam_beta2=-0.1, seed=-1).items()),
    (dict(learning_rate=float("inf")), "learning_rate=inf"), (dict(learning_rate=float("nan")), "learning_rate=nan"),
    *((dict(vllm_server_base_url=url), "http://") for url in ("localhost:8000", "http://a:1,b:2", [], [8000], ["http://"], "")),
    (dict(tools=len), "tools=[f]"), (dict(tools=5), "tools=[f]"), (dict(peft_config=dict(r=8)), "peft.LoraConfig"), (dict(loop_cls=5), "loop_cls"),
    (dict(centering_tail=True, score_centering=False), "score_centering=True"), (dict(torch_compile_mode="default"), "torch_compile=True")])
def test_a_broken_constraint_is_a_sentence_that_names_the_option(changes, named):
    with pytest.raises(ConfigError) as caught:
        tiny_config(**changes)
    assert named in str(caught.value) and str(caught.value).endswith(".")


@pytest.mark.parametrize("changes", [
    dict(logging_steps=0.1, max_steps=5), dict(model_init_kwargs=dict(dtype="bfloat16")), dict(top_p=0.9, top_k=50), dict(min_p=0.0), dict(temperature=0.01), dict(max_staleness=0), dict(num_train_epochs=0.5),
    dict(num_train_epochs=0, max_steps=5), dict(save_steps=0.1, max_steps=5), dict(eval_dataset=[], eval_steps=1), dict(lr_scheduler_type="linear", max_steps=5, warmup_steps=0.1),
    dict(vllm_importance_sampling_clip_min=1.0, vllm_importance_sampling_clip_max=1.0), dict(max_grad_norm=0.0), dict(learning_rate=0.0), dict(save_total_limit=0),
    dict(replay="run/rollouts", token_budget=9, output_dir="run/again"), dict(dtype="float16", fp16=True), dict(tools=[]), dict(vllm_server_base_url=["http://a:1", "https://b"])])
def test_the_edge_of_a_constraint_is_allowed(changes):
    assert all(getattr(tiny_config(**changes), name) == value for name, value in changes.items())


def test_one_function_and_a_list_of_functions_are_both_reward_functions():
    assert tiny_config(reward_funcs=len).reward_functions == [len]
    assert tiny_config(reward_funcs=(len, max)).reward_functions == [len, max]


@pytest.mark.parametrize("changes, restricted", [
    (dict(), False), (dict(min_p=0.0), False), (dict(top_k=5), True), (dict(top_k=5, min_p=0.1), True)])
def test_sampling_is_restricted_exactly_when_a_filter_is_on(changes, restricted):
    assert tiny_config(**changes).restricted_sampling is restricted


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiny_config().seed = 1


def test_lambdas_and_closures_of_a_config_file_work(tmp_path):
    assert load_config([write(tmp_path)]).reward_funcs(completions=["ab", "c"]) == [4.0, 2.0]


def test_functions_of_a_config_file_can_be_inspected_and_pickled(tmp_path):
    text = "from config import Config\ndef reward(**columns): return [1.0]\nconfig = Config(model='tiny', reward_funcs=reward)"
    reward = load_config([write(tmp_path, text)]).reward_funcs
    assert inspect.getsource(reward).startswith("def reward") and pickle.loads(pickle.dumps(reward)) is reward


def test_output_goes_to_runs_and_the_name_of_the_file_unless_said_otherwise(tmp_path):
    assert load_config([write(tmp_path)]).output_dir == "runs/my_run"
    assert load_config([write(tmp_path), "output_dir=none"]).output_dir == "runs/my_run"
    assert load_config([write(tmp_path), "output_dir=elsewhere"]).output_dir == "elsewhere"
    assert load_config([write(tmp_path, FILE.replace('"tiny",', '"tiny", output_dir="kept",'))]).output_dir == "kept"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda path: path.stem)
def test_every_config_of_the_repository_loads(path):
    config = load_config([str(path)])
    assert config.output_dir == f"runs/{path.stem}" and (config.train_dataset or config.environment_factory) is not None


def test_a_variant_differs_from_its_base_only_where_it_says():
    from configs.smollm_cpu import config as base
    variant = load_config([str(Path(ROOT, "configs", "smollm_cpu_clipped.py"))])
    changed = {name: getattr(variant, name) for name in DEFAULTS if getattr(variant, name) != getattr(base, name)}
    assert changed == dict(score_centering=False, epsilon_high=0.28, output_dir="runs/smollm_cpu_clipped")


@pytest.mark.parametrize("path", sorted([*(ROOT / "bench").glob("*.py"), *(ROOT / "tests").glob("*drills.py")]), ids=lambda path: path.stem)
def test_every_bench_and_drill_finds_the_names_it_imports_from_here(path):
    folders = (ROOT, path.parent)
    own = {file.stem for folder in folders for file in folder.glob("*.py")}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module in own:
            source = next(folder / f"{node.module}.py" for folder in folders if (folder / f"{node.module}.py").exists())
            found = {name for at in ast.parse(source.read_text()).body for name in bound(at)}
            assert {alias.name for alias in node.names} <= found


def bound(statement):
    """Names that a module's statement binds."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [statement.name]
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return [(alias.asname or alias.name).split(".")[0] for alias in statement.names]
    return [node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
