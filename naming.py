"""Which model a request names: the one the server was started with, or a version of its adapters."""
from collections import Counter
from contextlib import contextmanager

NEVER = 2**62            # no request in flight names a version


def adapter_name(version: int) -> str:
    return f"policy-v{version}"


class Naming:
    """Gives each request its model's name and keeps `oldest_named`, so that no adapter is unloaded while a request in flight names it."""

    def __init__(self, model: str, adapters, oldest_named):
        self.model, self.adapters, self.oldest_named, self.named = model, adapters, oldest_named, Counter()

    @contextmanager
    def __call__(self, version: int):
        self.named[version] += 1
        self.oldest_named.value = min(self.named)
        try:
            yield adapter_name(version) if self.adapters.value else self.model
        finally:
            self.named -= Counter([version])                 # drops a version that nobody names any more
            self.oldest_named.value = min(self.named, default=NEVER)
