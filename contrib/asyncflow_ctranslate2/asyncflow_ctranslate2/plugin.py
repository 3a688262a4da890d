"""The plugin registered with the SDK."""

import asyncflow_sdk as af


@af.hookimpl
def asyncflow_adapters() -> list[af.AdapterSpec]:
    return [
        af.AdapterSpec(
            kind="rollout",
            name="ctranslate2",
            factory="asyncflow_ctranslate2.engine:CTranslate2Engine",
            requires=["ctranslate2>=4.8", "transformers>=5", "torch>=2.6"],
            install="pip install asyncflow-ctranslate2",
            tested="ctranslate2 4.8.5 on a CPU",
        )
    ]
