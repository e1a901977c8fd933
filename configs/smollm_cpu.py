"""The quick start: SmolLM2-135M-Instruct learns one-digit addition on two CPU cores in minutes."""
import re
from pathlib import Path

from config import Config

ROOT = Path(__file__).resolve().parent.parent


def additions():
    return [dict(prompt=[dict(role="user", content=f"What is {a} + {b}? Answer with the number only.")], answer=a + b)
            for a in range(10) for b in range(10)]


def right_number(completions, answer, **columns):
    """1 when the last number of the reply is the answer."""
    return [float(re.findall(r"\d+", reply[0]["content"])[-1:] == [str(a)]) for reply, a in zip(completions, answer)]


config = Config(
    model=str(ROOT / "models" / "SmolLM2-135M-Instruct"), train_dataset=additions, reward_funcs=right_number,
    max_completion_length=12, learning_rate=1e-5, max_steps=20, token_budget=384, max_staleness=1, max_concurrent_rollouts=32,
    gradient_checkpointing=False, launch_server=True, vllm_max_model_length=256)
