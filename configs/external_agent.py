"""An agent that speaks to the server with an OpenAI client: it returns its turns, and they are trained like any others."""
from dataclasses import replace

from openai import AsyncOpenAI

from chat_api import chat_request, chat_turn
from configs.smollm_cpu import config as base
from rollout import AsyncRolloutLoop, Rollout

class DoubtingAgent(AsyncRolloutLoop):
    async def setup(self):
        self.client = AsyncOpenAI(base_url=f"{self.config.server_urls[0]}/v1", api_key="none")

    async def generate_one(self, prompt, tools, group_id=0):
        turns, messages = [], list(prompt)
        for doubt in ("Are you sure? Answer with the number only.", None):
            version = self.shared.version.value
            reply = await self.client.chat.completions.create(messages=messages, **chat_request(self.config, self.next_seed()))
            turns.append(chat_turn(reply.model_dump(), version))
            messages.append(dict(role="assistant", content=reply.choices[0].message.content))
            messages += [dict(role="user", content=doubt)] if doubt else []
        return Rollout(messages[len(prompt):], [token for turn in turns for token in turn.output_ids], turns)


def last_reply(completions, answer, **columns):
    """1 when the last reply holds the right number."""
    return [float(str(a) in completion[-1]["content"]) for completion, a in zip(completions, answer)]


config = replace(base, loop_cls=DoubtingAgent, reward_funcs=last_reply, token_budget=512, output_dir=None)
