"""Runs that are evaluated by scores known in advance, and keep the best of their checkpoints."""

from functools import partial

from sentence_transformers.base.evaluation import BaseEvaluator
from transformers import EarlyStoppingCallback

from metaphrase.training.trainer import AlignmentTrainer

#: As `metaphrase adapt` has them: one checkpoint is kept beside the best.
SETTINGS = {
    "max_steps": 12,
    "save_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_total_limit": 1,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_score",
    "greater_is_better": True,
}


class Scores(BaseEvaluator):
    """Gives the score of the present step, under two names."""

    def __init__(self, scores):
        super().__init__()
        self.scores = scores

    def __call__(self, model, output_path=None, epoch=-1, steps=-1):
        score = self.scores.get(steps, 0.0)
        return {"score": score, "score2": score}


def scored(scores, path=None):
    """A trainer that is measured by these scores, and ends where three evaluations brought nothing better."""

    class Trainer(AlignmentTrainer):
        def train(self, *args, **kwargs):
            result = super().train(*args, **kwargs)
            if path is not None:
                path.write_text(str(self.state.global_step))
            return result

    def make(*args, callbacks=(), **kwargs):
        callbacks = [EarlyStoppingCallback(early_stopping_patience=3), *callbacks]
        return Trainer(*args, evaluator=Scores(scores), callbacks=callbacks, **kwargs)

    return partial(make)
