"""Small trainings that scalers of gradients are compared in, by name."""

from ._by_hand import Experts, GrowingRNN, TanhLayers
from ._several import ActorCritic, Adversaries, LossesAtOnce, LossesByTurns
from ._training import Training
from ._transformers import BERT, Llama, ResNet, ViT

TRAININGS: dict[str, type[Training]] = {
    kind.title: kind
    for kind in (
        LossesAtOnce,
        LossesByTurns,
        Adversaries,
        ActorCritic,
        GrowingRNN,
        Experts,
        Llama,
        TanhLayers,
        ViT,
        ResNet,
        BERT,
    )
}
__all__ = ["TRAININGS", "Training"]
