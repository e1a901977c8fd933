"""The examples of the specification's agent chapter, in its order, with rewards that many groups differ in, so that steps come soon."""


def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product of the two integers.
    """
    return a * b


async def async_add(a: int, b: int) -> int:
    """
    Asynchronously adds two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The sum of the two integers.
    """
    return a + b


def length_reward(completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]


def format_reward(completions, **columns):
    return [0.1 * ("tool_calls" in completion[0]) for completion in completions]


class DatasetIncrementEnv:
    def reset(self, target, **columns) -> None:
        self.counter = 0
        self.target = target

    def get_reward(self) -> float:
        return float(self.counter == self.target)

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter


def targets():
    return [dict(prompt=[dict(role="user", content=f"Increment the counter by {i}.")], target=i) for i in range(1, 7)]


class CodingEnv:
    def reset(self, **columns) -> str:
        return "Compute the 7th Fibonacci number."

    def run_code(self, code: str) -> str:
        """Run the given Python code and return its stdout.

        Args:
            code: The Python source to execute.

        Returns:
            The captured standard output.
        """
        return f"{len(code)} characters ran"


class GameEnv:
    def reset(self, **columns) -> str:
        return "Reach the goal tile."

    def move(self, action: str) -> str:
        """Apply an action to the game and return the new observation.

        Args:
            action: One of "up", "down", "left", "right".

        Returns:
            The observation after the move.
        """
        return f"moved {action}"
