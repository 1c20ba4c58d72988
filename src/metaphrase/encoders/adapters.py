"""Adapters of PEFT, and copies of a model that share its weights.

After ``model.add_adapter(LoraConfig(…))``, training updates the adapter. The model is saved as a complete encoder with the
adapter merged into its weights; the adapter itself is saved in a subfolder, in PEFT's format.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from torch import nn
from transformers import PreTrainedModel

from metaphrase.exceptions import ModelError
from metaphrase.io.files import as_json, read_json, write_json

#: Folder of the adapter in a checkpoint or a release, and its files, as PEFT names them.
ADAPTER = "adapter"
ADAPTER_FILES = (f"{ADAPTER}/adapter_config.json", f"{ADAPTER}/adapter_model.safetensors")
_PREFIX = "base_model.model."


def add_lora(model: SentenceTransformer, rank: int) -> None:
    """Add a LoRA adapter (Hu et al. 2022) to all linear layers of the encoder in place. Only the adapter is trained."""
    from peft import LoraConfig

    model.add_adapter(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))
    for module in list(model)[1:]:
        module.requires_grad_(False)


def has_adapter(model: SentenceTransformer) -> bool:
    """Whether a model has an adapter."""
    encoder: Any = model[0].auto_model
    adapters = getattr(encoder, "peft_config", None)
    if adapters and not isinstance(encoder, PreTrainedModel):
        raise ModelError(
            f"The encoder is wrapped in a {type(encoder).__name__}. Add the adapter to the SentenceTransformer instead: "
            "model.add_adapter(LoraConfig(...))."
        )
    return bool(adapters)


def adapter_settings(model: SentenceTransformer) -> dict[str, Any]:
    """The settings of each adapter by its name, as JSON values."""
    if not has_adapter(model):
        return {}
    encoder: Any = model[0].auto_model
    settings = {name: config.to_dict() for name, config in encoder.peft_config.items()}
    return dict(as_json(settings, sort_keys=True, default=lambda v: sorted(v, key=str)))


def shared_copy(model: SentenceTransformer) -> SentenceTransformer:
    """Copy a model without its weights and tokenizer, which the copy shares.

    The copy has adapters merged into its weights, and computes in their type even if a trainer wrapped the model for mixed
    precision. The model does not change.
    """
    layers = _adapter_layers(model)
    own = {id(tensor) for layer in layers.values() for tensor in (*layer.parameters(), *layer.buffers())}
    parts = [model.tokenizer, *model.parameters(), *model.buffers()]
    shared: dict[int, Any] = {id(part): part for part in parts if id(part) not in own}
    shared[id(model.model_card_data)] = copy.copy(model.model_card_data)
    copied = copy.deepcopy(model, shared)
    for name in ("forward", "_original_forward"):  # set by accelerate; they would run the model instead of the copy
        vars(copied).pop(name, None)
    encoder: Any = copied[0].auto_model
    for name in layers:
        copied.set_submodule(name, _merged(copied.get_submodule(name)))
    if layers:
        encoder.delete_adapter(list(encoder.peft_config))
    return copied


def encoder_of(model: SentenceTransformer) -> Any:
    """The encoder of a model; with adapters merged into its weights, a copy that shares the others."""
    return (shared_copy(model) if has_adapter(model) else model)[0].auto_model


def save_adapter(model: SentenceTransformer, folder: Path) -> None:
    """Write the one active adapter of a model to `folder`, in PEFT's format."""
    encoder: Any = model[0].auto_model
    if len(active := encoder.active_adapters()) > 1:
        raise ModelError(
            f"One adapter can be saved, but {', '.join(active)} are active. Choose one: set_adapter(name)."
        )
    encoder.save_pretrained(folder)
    path = folder / "adapter_config.json"
    config = read_json(path)
    if Path(str(config["base_model_name_or_path"])).exists():
        config["base_model_name_or_path"] = None  # the path of a local folder is private
    write_json(path, config)


def load_weights(model: SentenceTransformer, saved: SentenceTransformer, folder: Path) -> None:
    """Set the weights of a model to those of a saved one, and its adapter to that in `folder`.

    The weights below an adapter are not set: they are frozen, and those of the saved model are merged with the adapter.
    """
    if not has_adapter(model):
        model.load_state_dict(saved.state_dict())
        return
    from peft import set_peft_model_state_dict

    encoder: Any = model[0].auto_model
    known = model.state_dict().keys()
    model.load_state_dict({key: value for key, value in saved.state_dict().items() if key in known}, strict=False)
    adapter = load_file(folder / "adapter_model.safetensors")
    (name,) = encoder.active_adapters()
    set_peft_model_state_dict(encoder, {key.removeprefix(_PREFIX): value for key, value in adapter.items()}, name)


def _adapter_layers(model: SentenceTransformer) -> dict[str, nn.Module]:
    """The outermost modules that adapters have put in place of the encoder's, by name."""
    if not has_adapter(model):
        return {}
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper) and not any(
            name.startswith(f"{outer}.") for outer in found
        ):
            found[name] = module
    return found


def _merged(layer: Any) -> nn.Module:
    """The module below an adapter, with the adapter merged into its weights; they are marked as trained."""
    if hasattr(layer, "unload_and_optionally_merge_module"):
        module = layer.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
    else:
        layer.merge()
        module = layer.get_base_layer()
    return module.requires_grad_(True)
