"""For asyncflow-sdk 0.1: a hook without arguments, and an AdapterSpec of the fields there were."""

import asyncflow_sdk as af


@af.hookimpl
def asyncflow_adapters():
    return [
        af.AdapterSpec(
            kind="rollout", name="old", factory="asyncflow_old:Old", requires=["numpy>=1.26"],
            install="pip install asyncflow-old", tested="numpy 2",
        )
    ]  # fmt: skip


class Old(af.RolloutEngine):
    capabilities = af.Capabilities(max_rows=64)

    def __init__(self, model=""):
        self.weights = {}

    async def generate(self, request):
        for index in range(request.n):
            ids = request.prompt_ids[: request.sampling.max_tokens]
            yield af.Completion(index, token_ids=ids, logprobs=[0.0] * len(ids), finish_reason="stop")

    async def load_weights(self, update):
        self.weights = {name: array.copy() for name, array in update.arrays()}
        return set(self.weights)
