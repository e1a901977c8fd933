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
    """Mixed into vLLM's scheduler. Its one loop over requests runs every few milliseconds in the thread that keeps the GPU fed, so it only notes where a token's row lies."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.held: dict[str, tuple[int, list[int]]] = {}     # by request: K, and the numbers of its tokens' rows
        self.rows = Rows()

    def add_request(self, request) -> None:
        params = request.sampling_params
        wanted = (params.extra_args or {}).get(FIELD) if params else None
        if type(wanted) is int and 0 <= wanted <= self.vllm_config.model_config.max_logprobs and params.num_logprobs is None:
            params.logprobs = wanted                         # here only: the API process has its own copy, and prepares for none
            self.held.setdefault(request.request_id, (wanted, []))
        super().add_request(request)

    def update_from_output(self, scheduler_output, model_runner_output):
        step, row_of, held = model_runner_output.logprobs, model_runner_output.req_id_to_index, self.held
        if not (held and step):
            return super().update_from_output(scheduler_output, model_runner_output)
        silent = held.keys() >= scheduler_output.num_scheduled_tokens.keys()
        if silent:
            model_runner_output.logprobs = None              # or it is sliced for each request
        if len(held) > len(self.requests):                   # some were aborted
            held = self.held = {name: tokens for name, tokens in held.items() if name in self.requests}
        starts, number = step.cu_num_generated_tokens, self.rows.add(step, held, self.requests)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for of_client in outputs.values():
            for output in of_client.outputs:
                if tokens := held.get(output.request_id):
                    if not silent:
                        output.new_logprobs = None
                    if new := output.new_token_ids:
                        row = row_of[output.request_id]
                        first = number + (starts[row] if starts else row)
                        tokens[1].extend(range(first, first + len(new))) if len(new) > 1 else tokens[1].append(first)
                    if output.finish_reason is not None:
                        del held[output.request_id]
                        output.kv_transfer_params = (output.kv_transfer_params or {}) | {FIELD: self.rows.pack(*tokens)}
        return outputs


class Rows:
    """Log-probs of the last steps, a row a token, numbered from the first on; those before the oldest that a request needs are dropped."""

    def __init__(self):
        self.ids, self.logprobs, self.first, self.count = np.empty((0, 0), "<i4"), np.empty((0, 0), "<f4"), 0, 0

    def add(self, step, held, alive) -> int:
        """The number of the step's first row."""
        new, width = step.logprobs.shape
        if self.count + new > len(self.ids) or width > self.ids.shape[1]:
            kept = self.count - (min((tokens[0] for name, (_, tokens) in held.items() if tokens and name in alive), default=self.first + self.count) - self.first)
            self.ids, self.logprobs = (self._moved(old, kept, max(2 * (kept + new), len(old)), max(width, old.shape[1])) for old in (self.ids, self.logprobs))
            self.first, self.count = self.first + self.count - kept, kept
        at = slice(self.count, self.count + new)
        self.ids[at, :width], self.logprobs[at, :width] = step.logprob_token_ids, step.logprobs
        self.count += new
        return self.first + at.start

    def _moved(self, old, kept: int, rows: int, width: int):
        new = np.empty((rows, width), old.dtype)
        new[:kept, :old.shape[1]] = old[self.count - kept:self.count]
        return new

    def pack(self, wanted: int, numbers: list[int]) -> dict[str, int | str]:
        """Rows of 1 + K: the sampled token, then the K most likely; `ids` int32 and `logprobs` float32, little-endian."""
        at = np.array(numbers, np.int64) - self.first
        ids, logprobs = (b64encode(all_rows[at, :wanted + 1]).decode() for all_rows in (self.ids, self.logprobs))
        return dict(count=len(at), ids=ids, logprobs=logprobs)


class PackedScheduler(PackedLogprobs, Scheduler):
    pass


class PackedAsyncScheduler(PackedLogprobs, AsyncScheduler):
    pass


def scheduler(vllm_config, **more):
    """The one of the two that vLLM's settings need."""
    return (PackedAsyncScheduler if vllm_config.scheduler_config.async_scheduling else PackedScheduler)(vllm_config=vllm_config, **more)
