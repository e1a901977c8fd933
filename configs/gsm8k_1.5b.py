"""Qwen2.5-Coder-1.5B learns grade-school arithmetic on one GPU, which server and trainer share: `python train.py configs/gsm8k_1.5b.py`.

GSM8K comes from `openai/gsm8k`, or from the files `train.jsonl` and `test.jsonl` of the folder in $GSM8K.
"""
import json
import os
from pathlib import Path

from config import Config
from rewards import number_match

ASK = " Think step by step, and end with the line: The answer is <number>."


def problems(split="train"):
    folder = os.environ.get("GSM8K")
    if folder:
        rows = [json.loads(line) for line in (Path(folder) / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]
    else:
        import datasets
        rows = datasets.load_dataset("openai/gsm8k", "main", split=split)
    return [dict(prompt=[dict(role="user", content=row["question"] + ASK)], answer=row["answer"].split("####")[-1].strip().replace(",", "")) for row in rows]


config = Config(
    model="Qwen/Qwen2.5-Coder-1.5B-Instruct", train_dataset=problems, reward_funcs=number_match, max_completion_length=512, token_budget=16384,
    gradient_accumulation_steps=4, learning_rate=5e-6, max_steps=64, max_staleness=2, max_concurrent_rollouts=512, launch_server=True, vllm_server_base_url="http://127.0.0.1:8000",
    vllm_max_model_length=1024, weight_sync_backend="ipc", torch_compile=True,
    eval_dataset=lambda: problems("test")[:100], eval_sampling=dict(temperature=0.0), eval_on_start=True, eval_steps=32)
