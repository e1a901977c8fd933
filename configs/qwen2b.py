"""Qwen3.5-2B on DeepMath-103K: server on one GPU (`CUDA_VISIBLE_DEVICES=0 python serve.py configs/qwen2b.py`), trainer on others."""
from config import Config
from rewards import accuracy_reward

config = Config(
    model="Qwen/Qwen3.5-2B",
    train_dataset="trl-lib/DeepMath-103K",
    reward_funcs=accuracy_reward,
    vllm_max_model_length=4096,
    torch_compile=True,
)
