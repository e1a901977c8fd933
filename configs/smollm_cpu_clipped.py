"""A variant is a base and what differs: the quick start with GRPO's clipped surrogate instead of score centering."""
from dataclasses import replace

from configs.smollm_cpu import config as base

config = replace(base, score_centering=False, epsilon_high=0.28, output_dir=None)
