"""Differentially private federated learning in JAX.  `help(jfl.plan)`, `help(jfl.simulate)` and the README begin."""
from . import algorithms as algorithms
from . import batches as batches
from . import heterogeneity as heterogeneity
from . import mesh as mesh
from . import models as models
from . import proxy as proxy
from . import sampling as sampling
from . import schedules as schedules
from .algorithms import algorithm as algorithm
from .core import Algorithm as Algorithm
from .core import Context as Context
from .core import Diagnostics as Diagnostics
from .core import Federation as Federation
from .core import Fn as Fn
from .core import Guarantee as Guarantee
from .core import Health as Health
from .core import Keys as Keys
from .core import Mechanism as Mechanism
from .core import Metrics as Metrics
from .core import Plan as Plan
from .core import Release as Release
from .core import Rows as Rows
from .core import Run as Run
from .core import Task as Task
from .core import named as named
from .data import corrupt as corrupt
from .data import datasets as datasets
from .data import partition as partition
from .data import transform as transform
from .data.federation import federate as federate
from .data.population import population as population
from .deprecated import fingerprint as fingerprint
from .deprecated import round as round
from .deprecated import start as start
from .gradients import grad as grad
from .gradients import private_grad as private_grad
from .identity import describe as describe
from .lazy import submodules as _submodules
from .models import task as task
from .plan import plan as plan
from .privacy import bands as bands
from .privacy import wavelet as wavelet
from .privacy.accounting import epsilons as epsilons
from .privacy.accounting import guarantee as guarantee
from .privacy.accounting import guarantees as guarantees
from .privacy.calibration import calibrate as calibrate
from .privacy.mechanism import chain as chain
from .privacy.stages import bounded as bounded
from .privacy.stages import clip_adaptive as clip_adaptive
from .privacy.stages import clip_l2 as clip_l2
from .privacy.stages import clip_per_layer as clip_per_layer
from .privacy.stages import divide as divide
from .privacy.stages import gaussian as gaussian
from .privacy.stages import total as total
from .privacy.taint import check_privacy as check_privacy
from .round import init as init
from .round import run_round as run_round
from .simulate import HealthError as HealthError
from .simulate import Output as Output
from .simulate import scan as scan
from .simulate import simulate as simulate
from .sweep import Sweep as Sweep
from .sweep import sweep as sweep

__version__ = "0.1.0"

# where the badge and the notebooks find the project; its public address is not settled
REPOSITORY = "OWNER/jfl"

# What `from jfl import *` binds; names of earlier versions, which warn, are left out.
__all__ = [
    "Algorithm", "Context", "Diagnostics", "Federation", "Fn", "Guarantee", "Health", "HealthError",
    "Keys", "Mechanism", "Metrics", "Output", "Plan", "REPOSITORY", "Release", "Rows", "Run", "Sweep",
    "Task", "algorithm", "algorithms", "bands", "batches", "bounded", "calibrate", "chain", "check_privacy",
    "clip_adaptive", "clip_l2", "clip_per_layer", "corrupt", "datasets", "describe", "divide", "epsilons", "federate",
    "gaussian", "grad", "guarantee", "guarantees", "heterogeneity", "init", "mesh", "models",
    "named",
    "partition", "plan", "population", "printed", "private_grad", "proxy", "run_round", "sampling", "scan",
    "schedules", "simulate", "sweep", "task", "total", "transform", "wavelet",
]
__getattr__, __dir__ = _submodules(__name__, __path__)
