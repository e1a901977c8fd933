"""For agents that speak to the server in chat completions: what to ask it for, so that its reply is a turn to train on."""
from config import Config, ConfigError
from evaluate import evaluating
from tools import TurnRecord


def chat_request(config: Config, seed: int, model: str | None = None) -> dict:
    """Arguments of `client.chat.completions.create` besides the messages: the config's sampling, and the token ids and log-probs.

    seed: the loop's `next_seed()`; model: the adapter's name where there is one. Raises ConfigError for what the reply would not tell.
    """
    if config.restricted_sampling:
        raise ConfigError("a chat completion does not tell the candidate sets of top_k, top_p and min_p: leave these at their defaults.")
    if "{" not in (config.chat_template_kwargs or {}).get("chat_template", "{"):
        raise ConfigError("a chat template given by its name reaches no server: set chat_template_kwargs' chat_template to its text.")
    top = config.num_sampler_logprobs + 1 if config.score_centering else 1           # the server counts the sampled token among them
    changes = evaluating.get()[0]
    known = dict(model=model or config.model, max_tokens=config.max_completion_length, temperature=config.temperature, top_p=1.0, seed=seed,
                 logprobs=True, top_logprobs=top)
    template = {name: value for name, value in (config.chat_template_kwargs or {}).items() if name != "chat_template"}       # the server has that one from its start
    extra = dict(top_k=0, min_p=0.0, repetition_penalty=1.0, return_token_ids=True, return_tokens_as_token_ids=True, chat_template_kwargs=template)
    return known | dict(extra_body=extra | {name: value for name, value in changes.items() if name not in known}) | {
        name: value for name, value in changes.items() if name in known}


def chat_turn(reply: dict, version: int) -> TurnRecord:
    """The turn that a chat completion is; `version` is the model version when it was asked for, since the reply names none."""
    choice = reply["choices"][0]
    entries = choice["logprobs"]["content"]
    return TurnRecord(reply["prompt_token_ids"], choice["token_ids"], [_number(entry["logprob"]) for entry in entries],
                      output_sampler_logprobs=[{_id(top): _number(top["logprob"]) for top in entry["top_logprobs"]} for entry in entries],
                      model_version=version, mean_version=version, max_version=version)


def _id(entry: dict) -> int:
    return int(entry["token"].removeprefix("token_id:"))


def _number(value: float | None) -> float | None:
    return None if value is None or value <= -9999 else value      # vLLM's mark of a missing one
