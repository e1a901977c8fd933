"""Two environments in one run: the dataset's `environment` column routes, and a rollout sees the tools of its own environment alone."""
import random
from dataclasses import replace

from configs.increment_env import IncrementEnv
from configs.increment_env import config as base


class GuessEnv:
    def reset(self, **columns) -> str:
        self.hidden, self.guesses, self.found = random.randint(1, 4), 0, False
        return "Guess the number from 1 to 4."

    def get_reward(self) -> float:
        return self.found * 0.8 ** (self.guesses - 1)

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: Your guess.
        """
        self.guesses, self.found = self.guesses + 1, number == self.hidden
        return "right" if self.found else "higher" if number < self.hidden else "lower"


config = replace(base, environment_factory=dict(increment=IncrementEnv, guess=GuessEnv),
                 train_dataset=[dict(environment=name) for name in ("increment", "guess")], vllm_max_model_length=640, token_budget=640)
