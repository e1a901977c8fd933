"""What rendering and parsing cost a long conversation of tool calls: their share of a rollout's time beside a fast sampler.

    python bench/tools.py MODEL_FOLDER [tokens_per_s=1000] [tokens_per_turn=625]

The whole default loop runs one rollout in this process, with the model's tokenizer; the sampler is a stand-in that only waits, as long as
a server would that gives one request `tokens_per_s`. `exact` renders what is new, `whole` is a template that keeps no prefix, so that
every turn renders the conversation anew. One JSON object a line; the median of three rollouts, CPU time of rendering and parsing.
"""
import asyncio
import json
import statistics
import sys
import time
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from transformers import AutoTokenizer  # noqa: E402

from config import Config  # noqa: E402
from rollout import AsyncRolloutLoop, Shared  # noqa: E402
from tools import Chat, TurnRecord  # noqa: E402

CALL = '<tool_call>\n{"name": "look", "arguments": {"page": 7}}\n</tool_call>'
TEMPLATE = (Path(__file__).resolve().parent.parent / "configs" / "smollm_tools.jinja").read_text()
FORGETFUL = TEMPLATE.replace("message.content }}", "(message.content if loop.last else message.content.split('</think>')[-1]) }}", 1)


def look(page: int) -> str:
    """Reads a page.

    Args:
        page: Its number.
    """
    return " ".join(f"Line {next(numbers)} of page {page} says something." for _ in range(40))     # never the same twice


numbers = count(1000)


class Timed(Chat):
    spent = 0.0


for method in ("prompt", "next_prompt", "reply"):
    def timed(self, *args, plain=getattr(Chat, method)):
        started = time.process_time()
        try:
            return plain(self, *args)
        finally:
            self.spent += time.process_time() - started
    setattr(Timed, method, timed)


class Loop(AsyncRolloutLoop):
    """The default loop, with a stand-in for the server: `turns` replies, all but the last a call."""

    def chat(self, tools):
        return self.timed

    async def generate_one_turn(self, prompt_ids):
        self.turn += 1
        words = self.words[self.turn % 9:]               # nor are the replies
        ids = words + (self.call if self.turn < self.turns else []) + [self.tokenizer.eos_token_id]
        await asyncio.sleep(len(ids) / self.tokens_per_s)
        return TurnRecord(prompt_ids, ids, [-0.5] * len(ids))


def run(folder, turns, template, tokens_per_s=1000, tokens_per_turn=625):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = Config(model=folder, reward_funcs=len, tools=[look], chat_template_kwargs=dict(chat_template=template))
    loop = Loop(config, [{}], tokenizer, [tokenizer.eos_token_id], 10**9, Shared.create())
    page = len(tokenizer(look(7))["input_ids"])
    loop.words = tokenizer("So it is. " * 200)["input_ids"][:max(tokens_per_turn - page - 42, 40)]
    loop.call = tokenizer(CALL, add_special_tokens=False)["input_ids"]
    loop.turns, loop.tokens_per_s = turns, tokens_per_s
    shares, costs = [], []
    for _ in range(3):
        loop.timed, loop.turn = Timed(tokenizer, config.chat_template_kwargs, [look], [tokenizer.eos_token_id]), 0
        started = time.perf_counter()
        rollout = asyncio.run(loop.generate_one([dict(role="user", content="Read.")], [look]))
        assert len(rollout.turns) == turns
        costs.append(loop.timed.spent)
        shares.append(loop.timed.spent / (time.perf_counter() - started))
    last = rollout.turns[-1]
    return dict(turns=turns, conversation_tokens=len(last.prompt_ids) + len(last.output_ids), rendering="exact" if loop.timed.preserves("tool") else "whole",
                sampler_tokens_per_s=tokens_per_s, share_of_rollout_ratio=round(statistics.median(shares), 4),
                rendering_and_parsing_ms=round(1000 * statistics.median(costs), 1), a_turn_ms=round(1000 * statistics.median(costs) / turns, 2))


if __name__ == "__main__":
    options = {key: int(value) for key, value in (text.split("=") for text in sys.argv[2:])}
    for template in (TEMPLATE, FORGETFUL):
        for turns in (8, 64, 128):
            print(json.dumps(run(sys.argv[1], turns, template, **options)), flush=True)
