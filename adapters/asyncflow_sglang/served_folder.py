"""ServedFolder: a model folder as SGLang loads it, compared with versions before SGLang sees them.

SGLang silently skips tensors without a place, keeps the tensors that a version lacks, and converts dtypes.
"""

from __future__ import annotations

from pathlib import Path

from asyncflow_http.model_folder import check_fit, listed
from asyncflow_sdk.errors import ConfigError, WeightMismatch
from asyncflow_sdk.interfaces import WeightUpdate
from asyncflow_sdk.types.dtypes import SAFETENSORS_CODES
from asyncflow_sdk.workflow.loops.tokenizer import end_tokens
from asyncflow_sdk.workflow.model_folder import ModelFolder, text_config


class ServedFolder:
    """``folder``: a Hugging Face folder with safetensors. ``dtype``: of floating-point weights in
    SGLang; None: the folder's. Raises ConfigError.

    ``context``: maximum of tokens of prompt and response, None if the model has no limit.
    ``vocabulary``: token ids are below it. ``ends``: the model's end tokens.
    """

    def __init__(self, folder: str, dtype: str | None = None) -> None:
        self._model = ModelFolder(folder)
        text, self.vocabulary = text_config(self._model.config), self._model.vocabulary
        self.ends = end_tokens(folder)
        context = text.get("max_position_embeddings")
        self.context = int(context) if context else None
        self._saved = str(text.get("dtype") or text.get("torch_dtype") or "float32")
        self.dtype = dtype or self._saved

    def check(self, update: WeightUpdate) -> None:
        """Raise WeightMismatch, with all problems, for a version that does not fit the model."""
        check_fit(update, self._model, self._dtypes, holder="the server takes")
        odd = [name for name, given in update.tensors.items() if given.dtype not in SAFETENSORS_CODES]
        if odd:
            raise WeightMismatch(f"version {update.version}: safetensors has no dtype for {listed(odd)}")

    def check_alike(self, served: ServedFolder, name: str) -> None:
        """Raise ConfigError, with all problems, unless the SGLang ``name``, started with the
        folder ``served``, has the tensors and shapes of this folder, and no others."""
        ours, theirs = self._model, served._model
        kinds = [each.config.get("architectures") for each in (ours, theirs)]
        problems = [] if kinds[0] == kinds[1] else [f"it computes {kinds[1]}, the folder is of {kinds[0]}"]
        problems += ours.differences(theirs, "the folder", "the server's model")
        if problems:
            raise ConfigError(
                f"{name} serves {theirs.folder}, another model than {ours.folder}; nothing in it was touched:\n"
                f"  {listed(problems)}"
            )

    def context_of(self, longest: int) -> int:
        """Return the context of an SGLang whose prompts are shorter than ``longest``."""
        return longest if self.context is None else min(self.context, longest)

    def _dtypes(self, held: str) -> tuple[str, ...]:
        """Return accepted dtypes. Models keep some tensors in a dtype of their own, for example biases of routers."""
        if held == self._saved:
            return (self.dtype,)
        return (held, self.dtype) if held in ("float16", "bfloat16", "float32", "float64") else (held,)


def folder_of_server(model: str, revision: str | None, name: str) -> ServedFolder:
    """Return the folder of the SGLang ``name``, started with ``model``: a folder, or a
    downloaded model of the hub. Raises ConfigError if this host cannot read it."""
    folder = model
    try:
        if not Path(model).is_dir():
            from huggingface_hub import snapshot_download

            folder = snapshot_download(model, revision=revision, local_files_only=True)
        return ServedFolder(folder)
    except Exception as error:
        raise ConfigError(
            f"{name} serves {model!r}, which cannot be read here ({type(error).__name__}: {error}), so versions"
            " cannot be compared with it; start it with a model folder of this host"
        ) from None
