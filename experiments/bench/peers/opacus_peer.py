"""A plain PyTorch loop over clients; Opacus clips each example's gradient and adds the noise in W1
and W2.

    python opacus_peer.py --workload W1 --data FILE.npz --rounds 20 --repeats 5 --mode ghost

Mode `hooks`: Opacus' per-sample gradients and DPOptimizer.  Mode `ghost`: its norms without
per-sample gradients, two backward passes.  One wrapped model serves all clients.  Opacus has no
federated or client-level layer, so W3 and W5 are plain PyTorch (mode `plain`): local SGD, the
update clipped, noise on the sum.  JFL_PEER_THREADS sets PyTorch's threads, else 2.
"""

import os

import numpy as np
import workloads

try:
    import torch
    import torch_models
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    MISSING = None
except ImportError as error:
    MISSING = error


def private_trainer(spec, model, mode):
    """train(x, y): the local DP-SGD steps of one client, on `model` in place."""
    settings = dict(
        noise_multiplier=spec.noise, max_grad_norm=spec.clip, expected_batch_size=spec.batch
    )
    sgd = torch.optim.SGD(model.parameters(), spec.lr)
    if mode == "hooks":
        wrapped = GradSampleModule(model)
        optimiser = DPOptimizer(sgd, **settings)
        loss = torch.nn.CrossEntropyLoss()
    else:
        wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=spec.clip)
        optimiser = DPOptimizerFastGradientClipping(sgd, **settings)
        loss = DPLossFastGradientClipping(wrapped, optimiser, torch.nn.CrossEntropyLoss())

    def train(x, y):
        for bx, by in torch_models.batches(spec, x, y):
            optimiser.zero_grad()
            loss(wrapped(bx), by).backward()
            optimiser.step()

    return train


def build(spec, data, mode):
    torch.set_num_threads(int(os.environ.get("JFL_PEER_THREADS", 2)))
    torch.manual_seed(0)
    x, y = torch_models.tensors(spec, data)
    model = torch_models.network(spec)
    local = list(model.parameters())
    server = [p.detach().clone() for p in local]
    if mode == "plain":
        train = lambda x, y: torch_models.train(spec, model, x, y)
    else:
        train = private_trainer(spec, model, mode)
    rng = np.random.default_rng(0)

    @torch.no_grad()
    def add_update(total):
        update = torch._foreach_sub(local, server)
        if mode == "plain":
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(update)))
            torch._foreach_mul_(update, torch.clamp(spec.clip / norm, max=1.0))
        torch._foreach_add_(total, update)

    def run(rounds, tick):
        for _ in range(rounds):
            total = [torch.zeros_like(p) for p in server]
            for client in rng.choice(spec.clients, spec.cohort, replace=False):
                with torch.no_grad():
                    torch._foreach_copy_(local, server)
                train(x[client], y[client])
                add_update(total)
            if mode == "plain":
                torch._foreach_add_(
                    total, [torch.randn_like(p) * (spec.noise * spec.clip) for p in total]
                )
            torch._foreach_add_(server, total, alpha=1 / spec.cohort)
            tick()

    return run, lambda: torch_models.arrays(server)


if __name__ == "__main__":
    workloads.main(
        "PyTorch + Opacus",
        build,
        dict(record=("hooks", "ghost"), client=("plain",)),
        ("torch", "opacus", "numpy"),
        "pip install torch opacus",
        MISSING,
        workloads.NOTES,
    )
