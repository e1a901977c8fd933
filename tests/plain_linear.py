"""vLLM's CPU worker with its linear layers left unpacked, as they are on a GPU, so that a copy plan can be held against its own reload."""
from vllm import _custom_ops

from vllm_worker import CopyPlan

_custom_ops._supports_onednn = False


class PlainCopyPlan(CopyPlan):
    def _packed(self, model) -> None:
        return None
