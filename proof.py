"""Proof of sync: one short probe is scored by the servers and by the policy, so weights that did not arrive stop the run."""
import time

import numpy as np
import torch
import torch.distributed as dist

from attention import MULTIPLE
from config import Config
from metrics import Window
from model import Policy, to_device
from naming import adapter_name
from packing import Sample, pack_row
from sync import Silent, SyncFailed, WeightSync

BOUNDS = {torch.bfloat16: 0.2, torch.float16: 0.03}      # mean |difference| of log-probs; rounding alone gave 0.05 to 0.08 in bf16 (8 bits),
FULL_PRECISION = 1e-3                                     # and 5e-6 in fp32
LENGTH = 48


class Proof:
    """Scores a fixed probe after the first two syncs and every `verify_sync_steps`, and after one that took a server back; keeps the policy's scores to tell which version a server has."""

    def __init__(self, config: Config, policy: Policy, sync: WeightSync, dtype: torch.dtype):
        self.config, self.policy, self.sync = config, policy, sync
        self.bound, self.kind = BOUNDS.get(dtype, FULL_PRECISION), str(dtype).removeprefix("torch.")
        vocabulary = policy.lm.get_output_embeddings().weight.shape[0]
        self.ids = np.random.default_rng(0).integers(min(256, vocabulary // 2), min(4096, vocabulary), LENGTH).tolist()      # no special tokens there
        trained = np.arange(1, LENGTH, dtype=np.int32)
        sample = Sample(np.array(self.ids, np.int32), trained, np.zeros(LENGTH - 1, np.float32), np.empty((LENGTH - 1, 0), np.int32),
                        np.empty((LENGTH - 1, 0), np.float32), 0.0, 0, 0)
        device = next(policy.parameters()).device
        self.row = to_device(pack_row([sample], 1 if policy.backend == "sdpa" else MULTIPLE), device)[0]
        self.checks = 0                          # syncs so far
        self.scores: dict[int, np.ndarray] = {}  # the policy's, by version

    def check(self, version: int, window: Window) -> None:
        """Raise SyncFailed on all ranks unless every server in use scores the probe as the policy does. A collective."""
        back = self.sync.whole and self.config.verify_sync_steps > 0         # one that was taken back may be another by now
        started, due, next_due = time.monotonic(), back or self._due(version, self.checks), self._due(version + 1, self.checks + 1)
        self.checks += 1
        if due or next_due:
            self.scores[version] = self.policy_scores()
        if due:
            words = [self.problem(version) if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(words, src=0)
            if words[0]:
                raise SyncFailed(words[0])
            window.add("perf/verify_sync_s", time.monotonic() - started)

    def _due(self, version: int, checks: int) -> bool:
        every = self.config.verify_sync_steps
        return every > 0 and (checks < 2 or version % every == 0)        # a resumed run's first syncs too

    @torch.no_grad()
    def policy_scores(self) -> np.ndarray:
        """(LENGTH − 1,) log-probs at temperature 1, which a server gives for a prompt."""
        with self.policy.compute_weights:
            return self.policy(self.row, temperature=1.0)[0].float().cpu().numpy()

    def server_scores(self, server: int, version: int) -> np.ndarray:
        """(LENGTH − 1,) log-probs. Raises RuntimeError when the server gives none."""
        model = adapter_name(version) if self.sync.names_adapters else self.config.model
        sampling = dict(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        url, post = self.sync.control.urls[server], self.sync.control.reply
        reply = post(server, "/inference/v1/generate", dict(model=model, token_ids=self.ids, sampling_params=sampling))
        if reply.status_code == 404:
            reply = post(server, "/v1/completions", dict(model=model, prompt=self.ids, **sampling))
        if reply.status_code != 200:
            raise RuntimeError(f"the server at {url} did not score the probe of the sync ({reply.status_code}: {reply.text[:300]}).")
        found = reply.json()
        found = found.get("prompt_logprobs") or found["choices"][0]["prompt_logprobs"]
        return np.array([tokens[str(token)]["logprob"] for tokens, token in zip(found[1:], self.ids[1:], strict=True)], np.float32)

    def problem(self, version: int) -> str | None:
        """What is wrong, in a sentence. A server that has gone silent is out of use, as is any that was just taken back and fails; it is what is wrong where no other is left."""
        for server in list(self.sync.current):
            silent = False
            try:
                words = self._failure(server, version)
            except RuntimeError as error:
                words, silent = str(error), isinstance(error, Silent)
            except (AttributeError, LookupError, TypeError, ValueError) as error:        # what an odd answer does to the code that reads it
                words = f"the server at {self.sync.control.urls[server]} did not score the probe of the sync ({error!r})."
            if words and len(self.sync.current) > 1 and (silent or not self.sync.in_use[server]):
                self.sync.leave_out(server, words)
            elif words:
                self.sync.control.watch_end() if silent else None
                return words
        return None

    def _failure(self, server: int, version: int) -> str | None:
        theirs = self.server_scores(server, version)
        says = None if self.sync.names_adapters else self.sync.control.weight_version(server)
        distances = {v: float(np.abs(theirs - ours).mean()) for v, ours in self.scores.items()}
        if not distances[version] <= self.bound or says not in (None, str(version)):
            return self._sentence(self.sync.control.urls[server], version, distances, says)
        return None

    def _sentence(self, url: str, version: int, distances: dict[int, float], says: str | None) -> str:
        nearest = min(distances, key=distances.get)
        seems = (f"it seems to serve version {nearest}" if nearest != version and distances[nearest] <= self.bound else
                 f"of the versions known here it is nearest to {nearest} ({distances[nearest]:.3g})" if nearest != version else
                 "it is nearest to that version all the same, so part of it did not arrive")
        if distances[version] <= self.bound:
            seems = "so another process may have sent it weights"
        anew = ", as one that was started anew does" if says == "default" else ""
        told = "" if says in (None, str(version)) else f" The server itself says version {says!r}{anew}."
        return (f"the server at {url} does not serve version {version} of the policy: its log-probs of a probe are off by {distances[version]:.3g} on average, "
                f"where {self.bound} is allowed for {self.kind}; {seems}.{told}")
