"""Safe reading of a model's folder.

A model's folder is untrusted. `open_model` checks it and opens a temporary copy for transformers and
sentence-transformers, which contains only settings, without keys that lead to code, kernels or other files; tokenizer
files; and weights in safetensors format. Weights and vocabularies are links, so copying takes milliseconds. Files and keys
that are not in the tables of this module are not read.
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from sentence_transformers.sentence_transformer.modules import (
    CNN,
    Dense,
    Dropout,
    LayerNorm,
    Normalize,
    Pooling,
    Transformer,
    WeightedLayerPooling,
)
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel

from metaphrase.exceptions import MetaphraseError, ModelError, ModelFileError
from metaphrase.io.redaction import excerpt

CONFIG, MODULES_FILE, WEIGHTS = "config.json", "modules.json", "model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
INDEX = f"{WEIGHTS}.index.json"
#: File of the task vector in a folder or a repository that has nothing else to load.
VECTOR_FILE = "task_vector.safetensors"

#: Modules that a model may consist of. The first is the Transformer. Those that have weights keep them in safetensors.
MODULES = {
    module.__name__: module
    for module in (Transformer, Pooling, Dense, Normalize, LayerNorm, Dropout, WeightedLayerPooling, CNN)
}
_WITH_WEIGHTS = (Dense, LayerNorm, WeightedLayerPooling, CNN)
#: Files of a tokenizer. The settings among them are JSON objects; one of the others must exist.
_TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
_VOCABULARIES = (
    *("tokenizer.json", "vocab.txt", "vocab.json", "bpe.codes", "tokenizer.model"),
    *("sentencepiece.bpe.model", "spiece.model", "spm.model", "source.spm"),
)
_TOKENIZER_FILES = (*_VOCABULARIES, "merges.txt", "added_tokens.json", "target.spm", "target_vocab.json")

#: Keys of `config.json` that have no effect, and all that start with "_". They lead to code (`auto_map`), to kernels that
#: are fetched or compiled (`attn_implementation`), or to changes of the model's class. This library sets the attention.
_IGNORED = {
    *("auto_map", "attn_implementation", "experts_implementation", "use_kernels", "kernel_config", "fusion_config"),
    *("trust_remote_code", "name_or_path", "distributed_config", "attribute_map", "custom_generate"),
    "custom_pipelines",
}
#: Keys of `config.json` that change how the weights are read, with the reason for refusing them.
_REFUSED = {
    "quantization_config": "quantised weights are not supported",
    "transformers_weights": f"weights must be in {WEIGHTS}",
    "configuration_files": f"settings must be in {CONFIG}",
}
_DTYPES = ("float16", "bfloat16", "float32", "float64")
#: Keys of `sentence_bert_config.json`, and the arguments that its dictionaries may pass on.
_TRANSFORMER_KEYS = ("max_seq_length", "do_lower_case", "unpad_inputs")
_ARGUMENTS = {
    **dict.fromkeys(("model_args", "model_kwargs"), ("add_pooling_layer", "dtype", "torch_dtype")),
    **dict.fromkeys(("tokenizer_args", "processor_kwargs"), ("model_max_length", "padding_side", "truncation_side")),
    **dict.fromkeys(("config_args", "config_kwargs"), ("use_cache",)),
}
#: The one way to call the encoder. Others would call any of its methods with the inputs.
_CALL = {
    "transformer_task": "feature-extraction",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": "token_embeddings",
}
_MODEL_KEYS = ("prompts", "default_prompt_name", "similarity_fn_name", "truncate_dim")
#: Keys of `tokenizer_config.json` with text, and with lists or dictionaries. Numbers and truth values have any key.
_TOKENIZER_TEXT = {
    *("tokenizer_class", "backend", "padding_side", "truncation_side", "padding", "truncation", "truncation_strategy"),
    *("src_lang", "tgt_lang", "errors", "vocab_type", "word_tokenizer_type", "subword_tokenizer_type", "lang"),
}
_TOKENIZER_LISTS = {
    *("additional_special_tokens", "extra_special_tokens", "added_tokens_decoder", "model_input_names", "never_split"),
    *("language_codes", "model_specific_special_tokens"),
}

_HEADS_KEYS = {"model_type", "architectures", "dtype", "objectives", "languages", "transformers_version"}
#: Limits of settings: bytes of a file, nesting, and parts of a model of one kind (`num_…`).
MAX_SETTINGS_BYTES, MAX_DEPTH, MAX_PARTS = 4_000_000, 30, 2**16


def holds_model(folder: Path) -> bool:
    """Whether a folder holds a model, a tokenizer or a task vector. Its files may be incomplete."""
    files = (MODULES_FILE, CONFIG, VECTOR_FILE, WEIGHTS, INDEX, ADAPTER_CONFIG, *_VOCABULARIES)
    return any((folder / file).is_file() for file in files)


def is_local(name: str | Path) -> bool:
    """Whether a name is that of a file, or of a folder with a model.

    A folder that contains no model does not shadow an installed model or one on the Hub.
    """
    place = Path(name)
    return holds_model(place) if place.is_dir() else place.exists()


def public_name(name: str) -> str:
    """The name of a model without the path to a local one, which is private."""
    return Path(name).resolve().name if is_local(name) else name


@contextmanager
def open_model(name: str, folder: Path) -> Iterator[Path]:
    """Check a model's folder, and open a temporary copy of what may be read of it.

    Errors of other libraries inside the block become a `ModelFileError` with one sentence.
    """
    with tempfile.TemporaryDirectory(prefix="metaphrase-") as temporary:
        files = _Files(name, folder, Path(temporary))
        if files.find(MODULES_FILE):
            _copy_model_settings(files)  # first: a model of another kind has other modules
        modules = read_modules(name, folder)
        if files.find(MODULES_FILE):
            listed = [
                {"idx": at, "name": str(at), "path": path, "type": f"{cls.__module__}.{cls.__qualname__}"}
                for at, (cls, path) in enumerate(modules)
            ]
            files.write(MODULES_FILE, listed)
        _copy_transformer(files, modules[0][1])
        for cls, path in modules[1:]:
            _copy_module(files, cls, path)
        with _errors_as(f"{name} cannot be loaded: its files are damaged, or come from different models", temporary):
            yield Path(temporary)


@contextmanager
def open_tokenizer(name: str, folder: Path) -> Iterator[Path]:
    """Check the files of a tokenizer, and open a temporary copy of what may be read of them; see `open_model`."""
    with tempfile.TemporaryDirectory(prefix="metaphrase-") as temporary:
        files = _Files(name, folder, Path(temporary))
        if config := files.read(CONFIG):
            files.write(CONFIG, _clean_config(config, path=f"{CONFIG} of {name}"))
        _copy_tokenizer(files, "")
        with _errors_as(f"The tokenizer of {name} cannot be loaded", temporary):
            yield Path(temporary)


@contextmanager
def open_heads(name: str, folder: Path, build: Callable[[Path], nn.Module]) -> Iterator[Path]:
    """Check a folder of training heads, and open a temporary copy of what may be read of it; see `open_model`.

    ``build`` makes heads without weights from the configuration in a folder.
    """
    with tempfile.TemporaryDirectory(prefix="metaphrase-") as temporary:
        files, path = _Files(name, folder, Path(temporary)), f"{CONFIG} of {name}"
        config = files.read(CONFIG)
        if config is None or not isinstance(encoder := config.get("encoder"), dict):
            raise ModelFileError(f"{path} is not a file of training heads: it has no encoder.")
        tensors, size = files.link_weights("")
        _check_objectives(config, path, tensors)
        encoder = _clean_config(encoder, path=path)
        files.write(CONFIG, {key: config[key] for key in _HEADS_KEYS & config.keys()} | {"encoder": encoder})
        with _errors_as(f"{path} does not describe training heads", temporary), torch.device("meta"):
            heads = build(Path(temporary))
        _check_size(heads, size, path)
        with _errors_as(f"The heads of {name} cannot be loaded", temporary):
            yield Path(temporary)


def _check_objectives(config: Mapping[str, Any], path: str, tensors: int) -> None:
    """Check the form of the settings of training heads; their values are checked when the heads are built."""
    objectives, languages = config.get("objectives", {}), config.get("languages", [])
    if not isinstance(objectives, dict) or not all(
        isinstance(made, dict) and isinstance(made.get("args"), dict) and isinstance(made.get("settings"), dict)
        for made in objectives.values()
    ):
        raise ModelFileError(
            f"{path} must map each of its objectives to its args and settings, but contains {excerpt(objectives)}."
        )
    if not isinstance(languages, list) or not all(isinstance(language, str) for language in languages):
        raise ModelFileError(f"{path} must list codes of languages, but contains {excerpt(languages)}.")
    _check_numbers(objectives, path, tensors)


def read_modules(name: str, folder: Path) -> list[tuple[type[nn.Module], str]]:
    """The class and the subfolder of each module; the Transformer of a model without `modules.json` is in ``""``."""
    listed = _Files(name, folder, folder).read(MODULES_FILE, list)
    if listed is None:
        return [(Transformer, "")]
    modules: list[tuple[type[nn.Module], str]] = []
    for entry in listed:
        kind, path = (entry.get("type"), entry.get("path")) if isinstance(entry, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(path, str):
            raise ModelFileError(
                f"{MODULES_FILE} of {name} must be a list of modules with a type and a path, but contains {excerpt(entry)}."
            )
        known = MODULES.get(kind.rpartition(".")[2])
        if not kind.startswith("sentence_transformers."):
            raise ModelError(_requires_code(name))
        if (known is Transformer) != (not modules) or known is None:
            expected = "starts with a Transformer" if not modules else f"consists of {', '.join(MODULES)}"
            raise ModelError(
                f"{MODULES_FILE} of {name} lists {excerpt(kind)}, but a model {expected}. Choose another encoder."
            )
        if not re.fullmatch(r"[\w.-]*", path) or path in (".", "..") or (modules and not path):
            raise ModelFileError(
                f"{MODULES_FILE} of {name} names the module folder {excerpt(path)}, which must lie directly in the model's "
                "folder."
            )
        modules.append((known, path))
    if not modules:
        raise ModelFileError(f"{MODULES_FILE} of {name} lists no module.")
    return modules


@contextmanager
def _errors_as(message: str, copy: str | Path) -> Iterator[None]:
    """Replace errors of other libraries that a model's files cause by a `ModelFileError`."""
    try:
        yield
    except (MetaphraseError, MemoryError, torch.OutOfMemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # raised by Rust code
            raise
        reason = excerpt(str(error).replace(f"{copy}/", "").replace(str(copy), "the folder"))
        raise ModelFileError(f"{message} ({type(error).__name__}: {reason}).") from error


def readable_file(name: str, folder: Path, path: str) -> Path | None:
    """A file of a model's folder, if it exists. It must be readable, and a link must not lead out of the folder."""
    file = folder / path
    try:
        if not file.exists():
            return None
        found, root = file.resolve(), folder.resolve()
        for repository in root.parents:  # in the Hub's cache, files are links to other files of the cache
            if repository.name.startswith("models--") and (repository / "snapshots").is_dir():
                root = repository.parent
        if not found.is_relative_to(root):
            raise ModelFileError(
                f"{path} of {name} is a link to {found}, outside the model's folder. Copy the file into the folder."
            )
        if not found.is_file():
            raise ModelFileError(f"{path} of {name} must be a file.")
        with found.open("rb"):
            return found
    except MetaphraseError:
        raise
    except OSError as error:
        raise ModelFileError(f"{path} of {name} cannot be read: {error.strerror}.") from error


@dataclass(frozen=True)
class _Files:
    """Reads the files of a model's folder, and writes or links them into its copy."""

    name: str
    folder: Path
    copy: Path

    def find(self, path: str) -> Path | None:
        """The file, if it exists; see `readable_file`."""
        return readable_file(self.name, self.folder, path)

    def read(self, path: str, kind: type = dict) -> Any:
        """The content of a JSON file; None if there is no such file."""
        file = self.find(path)
        if file is None:
            return None
        if file.stat().st_size > MAX_SETTINGS_BYTES:
            raise ModelFileError(
                f"{path} of {self.name} exceeds {MAX_SETTINGS_BYTES:,} bytes, the maximum for settings."
            )
        try:
            content = json.loads(file.read_bytes().decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise ModelFileError(f"{path} of {self.name} is not valid JSON: {excerpt(str(error))}.") from error
        if _is_deep(content):
            raise ModelFileError(f"{path} of {self.name} is nested too deeply.")
        if not isinstance(content, kind):
            expected = "a list" if kind is list else "an object"
            raise ModelFileError(f"{path} of {self.name} must contain {expected}, but contains {excerpt(content)}.")
        return content

    def write(self, path: str, content: Any) -> None:
        """Write a JSON file of the copy."""
        file = self.copy / path
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(content), encoding="utf-8")

    def link(self, path: str) -> Path | None:
        """Link a file into the copy."""
        found = self.find(path)
        if found is not None:
            (self.copy / path).parent.mkdir(exist_ok=True)
            try:
                (self.copy / path).symlink_to(found)
            except OSError:  # Windows permits links to administrators only
                shutil.copyfile(found, self.copy / path)
        return found

    def link_weights(self, folder: str) -> tuple[int, int]:
        """Link the weights of a module. Returns the number of tensors and of bytes."""
        index = None if self.find(_join(folder, WEIGHTS)) else self.read(_join(folder, INDEX))
        names = [WEIGHTS] if index is None else _weight_files(self.name, index)
        if index is not None:
            self.write(_join(folder, INDEX), {"metadata": {}, "weight_map": index["weight_map"]})
        tensors = size = 0
        for path in (_join(folder, name) for name in names):
            file = self.link(path)
            if file is None and index is not None:
                raise ModelFileError(
                    f"{self.name} is incomplete: its {INDEX} lists {path}, which is missing. Download or copy it again."
                )
            if file is None:
                raise ModelFileError(
                    f"{self.name} has no weights in safetensors format: {path} is missing. Other formats are pickles, which "
                    "can execute code when they are read, and are not loaded: ask its authors to convert it, or choose "
                    "another encoder."
                )
            try:
                with safe_open(file, framework="pt") as content:
                    tensors += len(content.keys())
            except Exception as error:
                raise ModelFileError(f"{path} of {self.name} is damaged: {excerpt(str(error))}.") from error
            size += file.stat().st_size
        return tensors, size


def _weight_files(name: str, index: Mapping[str, Any]) -> list[str]:
    """The files of weights that an index lists."""
    shards = index.get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ModelFileError(f"{INDEX} of {name} must map weights to files.")
    for shard in shards.values():
        if not isinstance(shard, str) or not re.fullmatch(r"[\w-][\w.-]*\.safetensors", shard):
            raise ModelFileError(f"{INDEX} of {name} refers to {excerpt(shard)}, which must be a safetensors file.")
    return sorted(set(shards.values()))


def _copy_model_settings(files: _Files) -> None:
    """Copy the settings of a SentenceTransformer, and its model card."""
    settings = files.read(name := "config_sentence_transformers.json") or {}
    kind = settings.get("model_type", "SentenceTransformer")
    if kind != "SentenceTransformer":
        raise ModelError(f"{files.name} is a {excerpt(kind)}, not a SentenceTransformer. Choose another encoder.")
    prompts = settings.get("prompts")
    if prompts is not None and not (
        isinstance(prompts, dict) and all(isinstance(text, str | None) for text in prompts.values())
    ):
        raise ModelFileError(f"{name} of {files.name} must map names to texts in prompts, not {excerpt(prompts)}.")
    files.write(name, {key: settings[key] for key in _MODEL_KEYS if settings.get(key) is not None})
    files.link("README.md")


def _copy_transformer(files: _Files, folder: str) -> None:
    config = files.read(path := _join(folder, CONFIG))
    if files.find(_join(folder, ADAPTER_CONFIG)):
        raise ModelError(f"{files.name} is a PEFT adapter. Merge it into its base model, and load the result.")
    if config is None:
        raise ModelFileError(f"{files.name} has no {path}, so it is not a model.")
    for key, reason in _REFUSED.items():
        if config.get(key) is not None:
            raise ModelError(f"{path} of {files.name} sets {key}, but {reason}. Choose another encoder.")
    tensors, size = files.link_weights(folder)
    config = _clean_config(config, path=f"{path} of {files.name}", tensors=tensors)
    files.write(path, config)
    if settings := _transformer_settings(files, folder):
        files.write(_join(folder, "sentence_bert_config.json"), settings)
    path = _join(folder, "generation_config.json")
    if config.get("is_encoder_decoder") and (generation := files.read(path)):
        files.write(path, _clean_config(generation, path=f"{path} of {files.name}"))
    _check_encoder(files, folder, config.get("model_type"), size)
    _copy_tokenizer(files, folder)


def _copy_tokenizer(files: _Files, folder: str) -> None:
    for settings_file in _TOKENIZER_SETTINGS:
        content = files.read(_join(folder, settings_file))
        if content is not None:
            files.write(_join(folder, settings_file), _tokenizer_settings(files.name, content))
    linked = [name for name in _TOKENIZER_FILES if files.link(_join(folder, name))]
    if not set(linked) & set(_VOCABULARIES):
        raise ModelFileError(
            f"{files.name} has no tokenizer: none of {', '.join(_VOCABULARIES[:3])}, … exists. Save the tokenizer into the "
            "model's folder."
        )


def _clean_config(config: dict[str, Any], *, path: str, tensors: int = MAX_PARTS) -> dict[str, Any]:
    """The settings of an encoder without those that have no effect; their types and numbers are checked."""
    config = _without_ignored(config)
    for key in ("dtype", "torch_dtype"):
        if config.get(key) is not None and config[key] not in _DTYPES:
            raise ModelFileError(
                f"{path} sets {key} to {excerpt(config[key])}, which must be one of {', '.join(_DTYPES)}."
            )
    _check_numbers(config, path, tensors)
    return config


def _check_numbers(content: Any, path: str, tensors: int = MAX_PARTS) -> None:
    """Refuse sizes for which no weights of so many tensors could exist, before memory is allocated for them."""
    for key, value in _leaves(content):
        limit = MAX_PARTS if key.startswith("num_") else 2**40
        if key.endswith(("layers", "n_layer")):
            limit = max(tensors, 100)
        if isinstance(value, int) and not -limit <= value <= limit:
            raise ModelFileError(
                f"{path} sets {excerpt(key)} to {excerpt(value)}, which is out of range for these weights."
            )


def _without_ignored(value: Any) -> Any:
    """Nested settings without keys that have no effect, and without texts that could name a file or a repository."""
    if isinstance(value, list):
        return [_without_ignored(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: item if key in ("id2label", "label2id") else _without_ignored(item)
        for key, item in value.items()
        if key not in _IGNORED
        and not key.startswith("_")
        and not (isinstance(item, str) and re.search(r"[/\\]", item))
    }


def _check_encoder(files: _Files, folder: str, kind: Any, size: int) -> None:
    """Check, without allocating memory, that the settings describe a text encoder no larger than the weights."""
    path = f"{_join(folder, CONFIG)} of {files.name}"
    if kind is None:
        raise ModelFileError(f"{path} has no model_type, so it is not the configuration of a model.")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise ModelError(_requires_code(files.name))
    if CONFIG_MAPPING[kind].__module__.startswith("metaphrase.") or CONFIG_MAPPING[kind].sub_configs:
        raise ModelError(f"{files.name} is a model of type {kind}, which is not a text encoder.")
    with _errors_as(f"{path} does not describe a model of type {kind}", files.copy), torch.device("meta"):
        encoder = AutoModel.from_config(AutoConfig.from_pretrained(files.copy / folder, local_files_only=True))
        if not isinstance(encoder.get_input_embeddings(), nn.Embedding):
            raise ModelError(f"{files.name} is a model of type {kind}, which is not a text encoder.")
    if getattr(encoder.config, "default_language", "") is None:
        raise ModelError(
            f"{path} sets no default_language, so no adapter of the encoder is selected. Set it to one of its languages."
        )
    _check_size(encoder, size, path)


def _check_size(module: nn.Module, size: int, path: str) -> None:
    """Check that a module is not larger than its weights in half precision, with room for a head."""
    values = sum(tensor.numel() for tensor in (*module.parameters(), *module.buffers()))
    if values > 2 * size + 2**20:
        raise ModelFileError(
            f"{path} describes a model of {values:,} values, but the weights have {size:,} bytes. Use files from the same "
            "model."
        )


def _transformer_settings(files: _Files, folder: str) -> dict[str, Any] | None:
    """The settings of sentence-transformers for its Transformer; older names are names of architectures."""
    kinds = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
    names = [f"sentence_{kind}_config.json" for kind in kinds]
    path, settings = next(
        ((path, content) for name in names if (content := files.read(path := _join(folder, name)))), ("", None)
    )
    if settings is None:
        return None
    kept: dict[str, Any] = {}
    for key, value in settings.items():
        if key in _ARGUMENTS and isinstance(value, dict):
            kept[key] = {
                name: given
                for name, given in value.items()
                if _is_allowed(files, path, f"{key}.{name}", name in _ARGUMENTS[key], given, ignored=_IGNORED)
            }
        elif _is_allowed(files, path, key, key in _TRANSFORMER_KEYS or value == _CALL.get(key, ...), value):
            kept[key] = value
    length = kept.get("max_seq_length")
    if length is not None and (not isinstance(length, int) or length < 1):
        raise ModelFileError(
            f"{path} of {files.name} sets max_seq_length to {excerpt(length)}; it must be at least 1."
        )
    return kept


def _is_allowed(files: _Files, path: str, key: str, known: bool, value: Any, ignored: Iterable[str] = ()) -> bool:
    """Whether to keep a setting; an unknown one that would change the model is refused."""
    if known:
        return True
    if value in (None, {}, "") or key.rpartition(".")[2] in {*ignored, "use_safetensors"}:
        return False
    raise ModelError(f"{path} of {files.name} sets {excerpt(key)} to {excerpt(value)}, which is not supported.")


def _tokenizer_settings(name: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a tokenizer without names of files."""
    if content.get("auto_map"):
        raise ModelError(_requires_code(name))
    kept = {}
    for key, value in content.items():
        scalar = value is None or isinstance(value, bool | int | float)
        text = key in _TOKENIZER_TEXT or key.endswith("_token")
        if (scalar or (text and isinstance(value, str | dict)) or key in _TOKENIZER_LISTS) and (
            key not in _IGNORED and not key.startswith("_")
        ):
            kept[key] = value
    return kept


def _copy_module(files: _Files, cls: type[nn.Module], folder: str) -> None:
    """Copy the settings and the weights of a module after the Transformer."""
    name = getattr(cls, "config_file_name", CONFIG)
    config = files.read(path := _join(folder, name))
    if config is None:
        return
    activation = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    if not isinstance(activation, str) or not re.fullmatch(r"torch\.nn\.modules\.\w+\.\w+", activation):
        raise ModelError(
            f"{path} of {files.name} sets activation_function to {excerpt(activation)}, not to one of torch."
        )
    _check_numbers(config, f"{path} of {files.name}")
    files.write(path, config)
    if cls in _WITH_WEIGHTS:
        _, size = files.link_weights(folder)
        with (
            _errors_as(f"{path} of {files.name} does not describe a {cls.__name__}", files.copy),
            torch.device("meta"),
        ):
            given: dict[str, Any] = cls.load_config(str(files.copy), subfolder=folder)
            known = inspect.signature(cls.__init__).parameters.keys() - {"activation_function"}
            module = cls(**{key: value for key, value in given.items() if key in known})
        _check_size(module, size, f"{path} of {files.name}")


def _leaves(content: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested settings that are neither lists nor objects, with the nearest key."""
    if isinstance(content, dict | list):
        for name, value in content.items() if isinstance(content, dict) else ((key, value) for value in content):
            yield from _leaves(value, name)
    else:
        yield key, content


def _is_deep(content: Any, depth: int = 0) -> bool:
    if not isinstance(content, dict | list):
        return depth > MAX_DEPTH
    values = content.values() if isinstance(content, dict) else content
    return depth > MAX_DEPTH or any(_is_deep(value, depth + 1) for value in values)


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _requires_code(name: str) -> str:
    return (
        f"{name} requires its own code, which is not run: only modules of sentence-transformers and models of "
        "transformers are loaded. Choose another encoder."
    )
