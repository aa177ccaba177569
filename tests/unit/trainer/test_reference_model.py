"""The reference model of the KL penalty is a copy that nothing trains."""

import torch
from accelerate import Accelerator

from repl_rl.trainer.reference_model import copy_frozen
from tests.support.trainer.tiny_policies import tiny_model


def test_the_reference_has_the_policys_weights_takes_no_gradient_and_does_not_follow_the_policy() -> None:
    policy = tiny_model()
    policy.train()
    reference = copy_frozen(policy, Accelerator(cpu=True))
    assert not reference.training
    assert not any(weight.requires_grad for weight in reference.parameters())
    assert all(weight.requires_grad for weight in policy.parameters())
    before = {name: weight.clone() for name, weight in reference.named_parameters()}
    assert all(torch.equal(before[name], weight) for name, weight in policy.named_parameters())
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(1.0)
    assert all(torch.equal(before[name], weight) for name, weight in reference.named_parameters())
