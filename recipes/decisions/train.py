"""Training data and losses for decisions.

Cross-entropy on the right choice::

    datums = decision_choice_datums(decision_renderer, [(decision, "billing"), ...])
    training_client.forward_backward(datums, "cross_entropy")

Any loss on the probabilities, such as Brier's::

    datums = decision_dist_datums(decision_renderer, [(decision, {"billing": 1.0}), ...])
    training_client.forward_backward_custom(datums, probability_loss(brier))

Both are proper scoring rules: their expectation is lowest at the true probabilities.
Suffixes of tensors: T tokens, K choices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tinker_cookbook.exceptions import DataValidationError, nearest
from tinker_cookbook.recipes.decisions.decision import Decision, DecisionRenderer
from tinker_cookbook.supervised.common import datum_from_model_input_weights
from tinker_cookbook.utils.imports import tinker, torch

ProbabilityLossFn = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]
"""``loss(choice_probs [K], target_probs [K])``: a scalar, differentiable in torch."""

CustomLossFn = Callable[
    ["list[tinker.Datum]", "list[torch.Tensor]"], "tuple[torch.Tensor, dict[str, float]]"
]


def decision_choice_datums(
    decision_renderer: DecisionRenderer, examples: Sequence[tuple[Decision, str]]
) -> list[tinker.Datum]:
    """Returns a ``cross_entropy`` datum for each decision with its right label.

    Only the token of the choice is trained, against the whole vocabulary.
    """
    datums = []
    for decision, target in examples:
        _check_label(decision, target)
        rendering = decision_renderer.render(decision)
        tokens = rendering.with_label(target)
        weights = [0.0] * len(tokens)
        weights[rendering.choice_pos] = 1.0
        datums.append(datum_from_model_input_weights(tinker.ModelInput.from_ints(tokens), weights))
    return datums


def decision_dist_datums(
    decision_renderer: DecisionRenderer,
    examples: Sequence[tuple[Decision, Mapping[str, float]]],
) -> list[tinker.Datum]:
    """Returns a datum for ``probability_loss`` for each decision with its target probabilities.

    Labels that a target leaves out have probability 0; ``{label: 1.0}`` is one right choice.
    """
    import torch

    datums = []
    for decision, target in examples:
        for label in target:
            _check_label(decision, label)
        rendering, labels = decision_renderer.render(decision), decision.labels
        # The input ends before the choice. The last row of each [T, K] tensor has the tokens of the
        # choices and their targets.
        shape = (rendering.choice_pos, len(labels))
        tokens_TK, weights_TK = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
        tokens_TK[-1] = torch.tensor([rendering.label_tokens[label] for label in labels])
        weights_TK[-1] = torch.tensor([float(target.get(label, 0.0)) for label in labels])
        datums.append(
            tinker.Datum(
                model_input=tinker.ModelInput.from_ints(rendering.tokens[: rendering.choice_pos]),
                loss_fn_inputs={
                    "target_tokens": tinker.TensorData.from_torch(tokens_TK),
                    "weights": tinker.TensorData.from_torch(weights_TK),
                },
            )
        )
    return datums


def probability_loss(loss_fn: ProbabilityLossFn) -> CustomLossFn:
    """Returns a loss for ``forward_backward_custom``: the mean of ``loss_fn`` over the datums.

    ``loss_fn`` receives the probabilities of the choices, normalised over them, and the targets.
    Metrics: ``loss``; ``target_prob:mean``, the mean expected probability of the target;
    ``accuracy``, the share of decisions whose most probable choice is the target's.
    """

    def custom_loss(
        data: list[tinker.Datum], logprobs_list: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        import torch

        losses, matches, right = [], [], 0
        for datum, logprobs_TK in zip(data, logprobs_list, strict=True):
            target_K = datum.loss_fn_inputs["weights"].to_torch()[-1].float()
            probs_K = torch.softmax(logprobs_TK[-1].float(), dim=-1)
            losses.append(loss_fn(probs_K, target_K))
            matches.append(float((probs_K.detach() * target_K).sum()))
            right += int(probs_K.argmax()) == int(target_K.argmax())
        loss = torch.stack(losses).mean()
        return loss, {
            "loss": float(loss.detach()),
            "target_prob:mean": sum(matches) / len(matches),
            "accuracy": right / len(data),
        }

    return custom_loss


def _check_label(decision: Decision, label: str) -> None:
    if label not in decision.labels:
        raise DataValidationError(
            f"target: got {label!r}, expected one of {decision.labels}"
            f"{nearest(label, decision.labels)}"
        )
