"""Runs inside the vLLM server (--scheduler-cls vllm_scheduler.scheduler): the log-probs of a request leave the engine once, packed, when it ends.

vLLM hands every token's log-probs from the engine to an API process in arrays of their own, makes an object there of each number and
writes them all as text; on an H200 that took more time than the model. A request with extra_args={"sampler_logprobs": K} gets
them as base64 in the reply's `kv_transfer_params` instead: a field that vLLM carries from scheduler to reply without looking
into it. If its reply is one message at its end, its tokens wait for that here too. Requests without it are served as ever.
"""
from base64 import b64encode
from typing import NamedTuple

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

FIELD = "sampler_logprobs"
# Newer engines write the weights' version on every message: a token that left late would be taken for a newer model's.
HOLDS = not hasattr(EngineCoreOutputs, "weight_version") and hasattr(EngineCoreOutput, "prefill_stats")


class PackedLogprobs:
    """Mixed into vLLM's scheduler. Its one loop over requests runs every few milliseconds in the thread that keeps the GPU fed, so it only notes where a token's row lies."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.held: dict[str, Held] = {}
        self.rows = Rows()

    def add_request(self, request) -> None:
        params = request.sampling_params
        wanted = (params.extra_args or {}).get(FIELD) if params else None
        most = self.vllm_config.model_config.max_logprobs    # -1: no limit
        if type(wanted) is int and 0 <= wanted and (wanted <= most or most == -1) and params.num_logprobs is None:
            params.logprobs = wanted                         # here only: the API process has its own copy, and prepares for none
            late = HOLDS and params.output_kind == RequestOutputKind.FINAL_ONLY and not params.detokenize and not params.stop       # nobody looks at its tokens before its end
            self.held.setdefault(request.request_id, Held(wanted, [], [] if late else None))
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
            waiting = False
            for output in of_client.outputs:
                if tokens := held.get(output.request_id):
                    if not silent:
                        output.new_logprobs = None
                    if new := output.new_token_ids:
                        row = row_of[output.request_id]
                        first = number + (starts[row] if starts else row)
                        tokens.rows.extend(range(first, first + len(new))) if len(new) > 1 else tokens.rows.append(first)
                    if output.finish_reason is not None:
                        del held[output.request_id]
                        output.kv_transfer_params = (output.kv_transfer_params or {}) | {FIELD: self.rows.pack(tokens.wanted, tokens.rows)}
                    if tokens.late is not None:
                        tokens.late.extend(new)
                        if output.finish_reason is None and output.events is output.prefill_stats is output.routed_experts is None:
                            output.new_token_ids, waiting = None, True
                        else:
                            output.new_token_ids = tokens.late[:]
                            tokens.late.clear()
            if waiting:
                of_client.outputs = [output for output in of_client.outputs if output.new_token_ids is not None]
        return {client: of_client for client, of_client in outputs.items() if of_client.outputs or of_client.finished_requests or of_client.scheduler_stats}


class Held(NamedTuple):
    """Of a request that has not ended."""

    wanted: int                  # K
    rows: list[int]              # numbers of its tokens' rows
    late: list[int] | None       # tokens that have not left


class Rows:
    """Log-probs of the last steps, a row a token, numbered from the first on, in chunks; those before the oldest that a request needs are dropped."""

    SIZE = 1 << 16                                           # rows of a chunk

    def __init__(self):
        self.chunks, self.next = {}, 0                       # by number // SIZE: ids, log-probs

    def add(self, step, held, alive) -> int:
        """The number of the step's first row."""
        new, width = step.logprobs.shape
        chunk = self.chunks.get(self.next // self.SIZE)
        if chunk is None or self.next % self.SIZE + new > self.SIZE or width > chunk[0].shape[1]:
            self.next = -(-self.next // self.SIZE) * self.SIZE
            oldest = min((tokens.rows[0] for name, tokens in held.items() if tokens.rows and name in alive), default=self.next) // self.SIZE
            self.chunks = {number: chunk for number, chunk in self.chunks.items() if number >= oldest}
            chunk = self.chunks[self.next // self.SIZE] = np.empty((self.SIZE, width), "<i4"), np.empty((self.SIZE, width), "<f4")
        first = self.next
        at = slice(first % self.SIZE, first % self.SIZE + new)
        chunk[0][at, :width], chunk[1][at, :width] = step.logprob_token_ids, step.logprobs
        self.next += new
        return first

    def pack(self, wanted: int, numbers: list[int]) -> dict[str, int | str]:
        """Rows of 1 + K: the sampled token, then the K most likely; `ids` int32 and `logprobs` float32, little-endian."""
        chunks, rows = np.divmod(np.array(numbers, np.int64), self.SIZE)
        parts = [(self.chunks[chunk], rows[chunks == chunk]) for chunk in np.unique(chunks).tolist()]
        ids, logprobs = (b"".join(chunk[i][at, :wanted + 1].tobytes() for chunk, at in parts) for i in (0, 1))
        return dict(count=len(rows), ids=b64encode(ids).decode(), logprobs=b64encode(logprobs).decode())


class PackedScheduler(PackedLogprobs, Scheduler):
    pass


class PackedAsyncScheduler(PackedLogprobs, AsyncScheduler):
    pass


def scheduler(vllm_config, **more):
    """The one of the two that vLLM's settings need."""
    return (PackedAsyncScheduler if vllm_config.scheduler_config.async_scheduling else PackedScheduler)(vllm_config=vllm_config, **more)
