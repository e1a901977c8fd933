"""Runs inside the vLLM server (--scheduler-cls vllm_scheduler.scheduler): the log-probs of a request leave the engine once, packed, when it ends.

vLLM hands every token's log-probs from the engine to an API process in arrays of their own, makes an object there of each number and
writes them all as text; on an H200 that took more time than the model. A request with extra_args={"sampler_logprobs": K} gets
them as base64 in the reply's `kv_transfer_params` instead: a field that vLLM carries from scheduler to reply without looking
into it. Requests without it are served as ever.
"""
from base64 import b64encode

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

FIELD = "sampler_logprobs"


class PackedLogprobs:
    """Mixed into vLLM's scheduler."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.held: dict[str, tuple[int, list]] = {}      # by request: K, and its tokens' ((steps' ids, log-probs), first row, rows)

    def add_request(self, request) -> None:
        params = request.sampling_params
        wanted = (params.extra_args or {}).get(FIELD) if params else None
        if type(wanted) is int and 0 <= wanted <= self.vllm_config.model_config.max_logprobs and params.num_logprobs is None:
            params.logprobs = wanted                     # here only: the API process has its own copy, and prepares for none
            self.held.setdefault(request.request_id, (wanted, []))
        super().add_request(request)

    def update_from_output(self, scheduler_output, model_runner_output):
        step, rows_of = model_runner_output.logprobs, model_runner_output.req_id_to_index
        if not (self.held and step):
            return super().update_from_output(scheduler_output, model_runner_output)
        if all(name in self.held for name in scheduler_output.num_scheduled_tokens):
            model_runner_output.logprobs = None          # or it is sliced for each request
        first = step.cu_num_generated_tokens or range(len(step.logprobs))
        arrays = step.logprob_token_ids.astype("<i4"), step.logprobs.astype("<f4")     # copies: the originals are pinned memory
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for of_client in outputs.values():
            for output in of_client.outputs:
                if output.request_id in self.held:
                    output.new_logprobs = None
                    wanted, tokens = self.held[output.request_id]
                    if output.new_token_ids:
                        tokens.append((arrays, first[rows_of[output.request_id]], len(output.new_token_ids)))
                    if output.finish_reason is not None:
                        del self.held[output.request_id]
                        output.kv_transfer_params = (output.kv_transfer_params or {}) | {FIELD: pack(tokens, wanted)}
        if len(self.held) > len(self.requests):          # some were aborted
            self.held = {name: tokens for name, tokens in self.held.items() if name in self.requests}
        return outputs


def pack(tokens: list, wanted: int) -> dict[str, int | str]:
    """Rows of 1 + K: the sampled token, then the K most likely; `ids` int32 and `logprobs` float32, little-endian."""
    parts = [np.concatenate([arrays[i][first:first + n, :wanted + 1] for arrays, first, n in tokens] or [np.empty((0, wanted + 1))]) for i in (0, 1)]
    return dict(count=len(parts[0]), ids=b64encode(parts[0]).decode(), logprobs=b64encode(parts[1]).decode())


class PackedScheduler(PackedLogprobs, Scheduler):
    pass


class PackedAsyncScheduler(PackedLogprobs, AsyncScheduler):
    pass


def scheduler(vllm_config, **more):
    """The one of the two that vLLM's settings need."""
    return (PackedAsyncScheduler if vllm_config.scheduler_config.async_scheduling else PackedScheduler)(vllm_config=vllm_config, **more)
