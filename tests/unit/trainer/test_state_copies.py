"""Copies of training states are complete, and their differences are found."""

import torch
from torch import Tensor

from repl_rl.trainer.plugins.checkpoint import copy_tensors, find_difference


def test_the_difference_of_two_states_is_found_bit_for_bit_and_named() -> None:
    weight = torch.tensor([0.0, float("nan")])
    saved = {"w": weight, "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]}
    assert find_difference(copy_tensors(saved), saved) == ""
    assert find_difference({**saved, "w": torch.tensor([-0.0, float("nan")])}, saved) == "w"
    assert find_difference({**saved, "w": weight.double()}, saved) == "w"
    assert find_difference({**saved, "groups": [{"lr": 0.1, "betas": (0.9, 0.98)}]}, saved, "o") == "o.groups.0.betas.1"
    assert find_difference({**saved, "groups": []}, saved) == "groups"


def test_a_copy_shares_no_tensor_with_its_state_at_any_depth() -> None:
    tensors = [torch.zeros(2) for _ in range(3)]

    def nest(first: Tensor, second: Tensor, third: Tensor) -> dict[str, object]:
        return {"w": first, "groups": [{"momenta": (second, [third]), "lr": 0.1}]}

    copied = copy_tensors(nest(*tensors))
    for tensor in tensors:
        tensor.fill_(7.0)
    assert find_difference(copied, nest(*(torch.zeros(2) for _ in range(3)))) == ""
