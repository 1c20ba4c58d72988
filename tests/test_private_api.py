"""The seams of other libraries that this one overrides or reads: each must be there, with the signature we rely on."""

import inspect

import pytest
import torch.utils.checkpoint
from sentence_transformers import SentenceTransformerTrainer
from sentence_transformers.base.model_card import YAML_FIELDS
from sentence_transformers.base.sampler import NoDuplicatesBatchSampler
from sentence_transformers.sentence_transformer.modules import Transformer
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, BertConfig, BertModel, Trainer, XLMRobertaModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING
from transformers.models.bert.modeling_bert import BertEncoder
from transformers.utils import cached_file

VARLEN = ["cu_seq_q", "cu_seq_k", "max_q", "max_k"]

SEAMS = {
    "get_data_collator": ["self", "model", "args", "processing_class"],
    "get_batch_sampler": ["self", "dataset", "batch_size", "drop_last", "valid_label_columns", "generator", "seed"],
    "collect_features": ["self", "inputs"],
    "compute_loss": ["self", "model", "inputs", "return_outputs", "num_items_in_batch"],
    "training_step": ["self", "model", "inputs", "num_items_in_batch"],
    "prediction_step": ["self", "model", "inputs", "prediction_loss_only", "ignore_keys"],
    "_clip_grad_norm": ["self", "model"],
    "_save": ["self", "output_dir", "state_dict"],
    "_load_from_checkpoint": ["self", "checkpoint_path"],
    "track_loss_components": ["self", "loss"],
    "save_model": ["self", "output_dir", "_internal_call"],
    "_get_grad_norm": ["self", "model", "grad_norm"],
    "_get_output_dir": ["self", "trial"],
    "_save_checkpoint": ["self", "model", "trial"],
    "_push_from_checkpoint": ["self", "checkpoint_folder"],
    "call_model_init": ["self", "trial"],
    "_hp_search_setup": ["self", "trial"],
    "create_optimizer": ["self", "model"],
    "init_hf_repo": ["self", "token", "private"],
    "_finalize_training": ["self", "trial", "num_train_samples", "start_time"],
    "_load_best_model": ["self"],
    "_evaluate": ["self", "trial", "ignore_keys_for_eval", "skip_scheduler"],
    "_determine_best_metric": ["self", "metrics", "trial"],
    "_build_dataloader": ["self", "dataset", "batch_size", "dataset_kind"],
    "get_batch_samples": ["self", "epoch_iterator", "num_batches", "device"],
    "_init_training_state": [
        "self",
        "max_steps",
        "num_update_steps_per_epoch",
        "num_train_epochs",
        "resume_from_checkpoint",
        "trial",
    ],
}


@pytest.mark.parametrize("name", SEAMS)
def test_trainer_methods(name):
    assert list(inspect.signature(getattr(SentenceTransformerTrainer, name)).parameters) == SEAMS[name]


def test_trainer_attributes():
    for name in ("training_args_class", "data_collator_class", "model_card_data_class", "loss_is_scaled_for_ga"):
        assert hasattr(SentenceTransformerTrainer, name), name
    assert "_clip_grad_norm" in inspect.getsource(Trainer)
    assert "self._load_from_checkpoint(resume_from_checkpoint)" in inspect.getsource(Trainer.train)


def test_a_checkpoint_is_written_where_the_output_folder_is():
    source = inspect.getsource(Trainer._save_checkpoint)
    assert "run_dir = self._get_output_dir(trial=trial)" in source
    assert "os.path.join(run_dir, checkpoint_folder)" in source
    assert "self.state.save_to_json(os.path.join(output_dir, TRAINER_STATE_NAME))" in source
    assert "weights_only=False" not in inspect.getsource(Trainer)


def test_a_step_without_gradients_changes_nothing():
    """The loop asks for the norm before it makes a step, and adds the loss before that."""
    loop = inspect.getsource(Trainer._run_epoch)
    order = [
        "on_step_begin",
        "self._tr_loss += tr_loss_step",
        "self._get_grad_norm(",
        "self.optimizer.step()",
        "on_step_end",
    ]
    places = [loop.index(name) for name in order]
    assert places == sorted(places)
    weight = torch.nn.Parameter(torch.ones(1))
    torch.optim.AdamW([weight], lr=1.0).step()
    assert weight.item() == 1


def test_the_parts_of_a_losss_log_are_kept_in_one_place():
    assert "self.accum_loss_components[training_type]" in inspect.getsource(
        SentenceTransformerTrainer.track_loss_components
    )


def test_the_loop_sets_the_epoch_before_it_makes_an_iterator():
    loop = inspect.getsource(Trainer._inner_training_loop)
    assert 0 < loop.index("on_epoch_begin") < loop.index("_run_epoch(")


def test_samplers_without_duplicates_take_hashes():
    assert "precompute_hashes" in inspect.signature(NoDuplicatesBatchSampler.__init__).parameters


@pytest.mark.parametrize("model", [BertModel, XLMRobertaModel])
def test_encoders_go_through_the_attention_interface(model):
    assert model._supports_attention_backend
    parameters = inspect.signature(model.forward).parameters
    assert "position_ids" in parameters
    assert parameters["kwargs"].kind is inspect.Parameter.VAR_KEYWORD
    assert hasattr(model, "set_attn_implementation")


def test_berts_layers_alone_go_through_it_too():
    config = BertConfig(num_hidden_layers=1, attn_implementation="eager")
    assert config._attn_implementation == "eager"
    parameters = inspect.signature(BertEncoder.forward).parameters
    assert parameters["kwargs"].kind is inspect.Parameter.VAR_KEYWORD


def test_a_checkpoint_is_made_again_to_its_end():
    assert "early_stop" in inspect.signature(torch.utils.checkpoint.checkpoint).parameters


def test_the_kernel_of_variable_lengths_drops_out():
    schema = torch.ops.aten._flash_attention_forward.default._schema
    names = [argument.name for argument in schema.arguments]
    assert names[:7] == ["query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k"]
    assert names[7:11] == ["dropout_p", "is_causal", "return_debug_mask", "scale"]
    assert [argument.name for argument in schema.arguments if not argument.kwarg_only] == names[:10]
    assert all(argument.has_default_value() for argument in schema.arguments[10:])
    assert schema.returns[0].name == "output"
    assert list(inspect.signature(varlen_attn).parameters)[:7] == ["query", "key", "value", *VARLEN]
    assert "dropout" not in str(inspect.signature(varlen_attn))  # with it, that would do


def test_attention_can_be_registered():
    assert callable(AttentionInterface.register)
    assert "sdpa" in AttentionMaskInterface()


def test_sentence_transformers_hands_unknown_features_to_the_encoder():
    source = inspect.getsource(Transformer.forward)
    assert "model_forward_params is None" in source
    assert "module_output_name" in source


def test_small_ones():
    assert YAML_FIELDS
    assert BertModel.config_class in MODEL_MAPPING
    assert (
        cached_file("nowhere/nothing", "x", local_files_only=True, _raise_exceptions_for_missing_entries=False) is None
    )
