"""Flower on its Ray simulation engine, PyTorch in the clients: ServerApp, FedAvg, central DP.

    python flower_peer.py --workload W1 --data FILE.npz --rounds 20 --repeats 5 --mode ghost

Flower has no record-level DP: in W1 and W2 modes `hooks` and `ghost` put Opacus' two ways of
clipping into the client.  W3 and W5 (mode `client`) use its central DP with fixed clipping in its
client-side form, where each actor clips.  There is one actor for each CPU, with one PyTorch thread
each; actors map the data from a file, and keep model and data between messages.  A round ends when
FedAvg has aggregated, seen through its server-side evaluation callback; `first` includes starting
Ray.
"""

import functools
import json
import os
import pathlib
import tempfile
from types import SimpleNamespace

import numpy as np
import workloads

try:
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import logging

    import opacus_peer
    import torch
    import torch_models
    from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.clientapp.mod import fixedclipping_mod
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg
    from flwr.simulation import run_simulation

    MISSING = opacus_peer.MISSING
except ImportError as error:
    MISSING = error


@functools.cache
def workplace(text):
    """An actor's (train, model, x, y) for the settings in `text`; made once in each actor."""
    settings = json.loads(text)
    spec = SimpleNamespace(**settings["spec"])
    torch.set_num_threads(1)
    torch.seed()  # else every actor draws the same noise
    folder = pathlib.Path(settings["folder"])
    x, y = (np.load(folder / f"{name}.npy", mmap_mode="c") for name in "xy")
    model = torch_models.network(spec)
    if spec.level == "record":
        train = opacus_peer.private_trainer(spec, model, settings["mode"])
    else:
        train = lambda x, y: torch_models.train(spec, model, x, y)
    return train, model, torch.from_numpy(x), torch.from_numpy(y)


def on_train(message, context):
    train, model, x, y = workplace(message.content["config"]["settings"])
    client = int(context.node_config["partition-id"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    train(x[client], y[client])
    content = dict(
        arrays=ArrayRecord(model.state_dict()), metrics=MetricRecord({"num-examples": x.shape[1]})
    )
    return Message(content=RecordDict(content), reply_to=message)


def client_app(clipping):
    app = ClientApp(mods=[fixedclipping_mod] if clipping else [])
    app.train()(on_train)
    return app


def build(spec, data, mode):
    folder = tempfile.TemporaryDirectory()
    for name, value in zip("xy", torch_models.tensors(spec, data)):
        np.save(pathlib.Path(folder.name) / name, value.numpy())
    text = json.dumps(dict(spec=vars(spec), mode=mode, folder=folder.name))
    model = torch_models.network(spec)
    logging.getLogger("flwr").setLevel(logging.ERROR)

    def run(rounds, tick, keep=folder):  # `keep`: the folder goes when this function goes
        strategy = FedAvg(
            fraction_train=(spec.cohort + 0.5) / spec.clients,
            fraction_evaluate=0.0,
            min_train_nodes=spec.cohort,
            min_available_nodes=spec.clients,
            train_metrics_aggr_fn=lambda contents, key: MetricRecord(dict(clients=len(contents))),
        )
        if mode == "client":
            strategy = DifferentialPrivacyClientSideFixedClipping(
                strategy, spec.noise, spec.clip, spec.cohort
            )
        server, ended = ServerApp(), []

        @server.main()
        def main(grid, context):
            def after(number, arrays):
                if number:  # 0: before the first
                    tick()

            result = strategy.start(
                grid,
                ArrayRecord(model.state_dict()),
                rounds,
                evaluate_fn=after,
                train_config=ConfigRecord(dict(settings=text)),
            )
            model.load_state_dict(result.arrays.to_torch_state_dict())
            ended.extend(m["clients"] for m in result.train_metrics_clientapp.values())

        ray = dict(num_cpus=os.cpu_count(), include_dashboard=False, log_to_driver=False)
        run_simulation(
            server,
            client_app(mode == "client"),
            spec.clients,
            backend_config=dict(client_resources=dict(num_cpus=1), init_args=ray),
        )
        assert ended == [spec.cohort] * rounds, f"Flower heard {ended} clients in {rounds} rounds"

    return run, lambda: torch_models.arrays(model.parameters())


if __name__ == "__main__":
    import flower_peer as peer  # so that actors find the client's functions by name

    workloads.main(
        "Flower",
        peer.build,
        dict(record=("hooks", "ghost"), client=("client",)),
        ("flwr", "ray", "torch", "opacus", "numpy"),
        'pip install torch opacus "flwr[simulation]"',
        MISSING,
        workloads.NOTES,
    )
