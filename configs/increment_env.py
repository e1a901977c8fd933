"""An environment that sets its own task and scores itself: SmolLM2 learns to call its one tool in a dozen steps."""
import random
from pathlib import Path

from config import Config

HERE = Path(__file__).resolve().parent


class IncrementEnv:
    def reset(self, **columns) -> str:
        self.counter, self.target = 0, random.randint(1, 6)
        return f"Increment the counter by {self.target}."

    def get_reward(self) -> float:
        return float(self.counter == self.target)

    def increment(self, step: int) -> int:
        """Increment the internal counter.

        Args:
            step: Value to add to the counter.
        """
        self.counter += step
        return self.counter


config = Config(
    model=str(HERE.parent / "models" / "SmolLM2-135M-Instruct"), environment_factory=IncrementEnv,
    chat_template_kwargs=dict(chat_template=(HERE / "smollm_tools.jinja").read_text()), max_tool_calling_iterations=3,
    max_steps=20, learning_rate=2e-5, max_completion_length=40, token_budget=512, max_staleness=1, max_concurrent_rollouts=32,
    gradient_checkpointing=False, launch_server=True, vllm_max_model_length=512)
