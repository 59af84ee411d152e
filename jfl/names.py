"""The public names of jfl, which it imports when one of them is used first."""

from . import algorithms as algorithms
from . import auditing as auditing
from . import models as models
from . import sampling as sampling
from . import schedules as schedules
from .algorithms import algorithm as algorithm
from .analysis import heterogeneity as heterogeneity
from .analysis import public_data as public_data
from .auditing.audit import AuditReport as AuditReport
from .auditing.audit import audit as audit
from .auditing.audit import audit_one_run as audit_one_run
from .auditing.membership import MembershipReport as MembershipReport
from .auditing.membership import audit_membership as audit_membership
from .core import errors as errors
from .core.errors import HealthError as HealthError
from .core.identity import describe as describe
from .core.records import Algorithm as Algorithm
from .core.records import Context as Context
from .core.records import Diagnostics as Diagnostics
from .core.records import Federation as Federation
from .core.records import Fn as Fn
from .core.records import Guarantee as Guarantee
from .core.records import Health as Health
from .core.records import Keys as Keys
from .core.records import Mechanism as Mechanism
from .core.records import Metric as Metric
from .core.records import Metrics as Metrics
from .core.records import Plan as Plan
from .core.records import Release as Release
from .core.records import Rows as Rows
from .core.records import Run as Run
from .core.records import Task as Task
from .core.records import named as named
from .data import corruption as corruption
from .data import datasets as datasets
from .data import partition as partition
from .data import transforms as transforms
from .data.federation import federate as federate
from .data.host_rows import population as population
from .engine import callbacks as callbacks
from .engine import devices as mesh
from .engine import loggers as loggers
from .engine.compiling import keep_compiled_programs as keep_compiled_programs
from .engine.metrics import predict as predict
from .engine.plan import plan as plan
from .engine.round import init as init
from .engine.round import run_round as run_round
from .engine.simulate import Output as Output
from .engine.simulate import scan as scan
from .engine.simulate import simulate as simulate
from .engine.sweep import Sweep as Sweep
from .engine.sweep import sweep as sweep
from .engine.tuning import Choice as Choice
from .engine.tuning import ask_tell as ask_tell
from .engine.tuning import choose as choose
from .gradients.per_example import grad as grad
from .gradients.per_example import private_grad as private_grad
from .local import optimizers as optimizers
from .models.tasks import task as task
from .privacy.budget import Budget as Budget
from .privacy.budget import budget as budget
from .privacy.calibration import calibrate as calibrate
from .privacy.guarantees import at_scale as at_scale
from .privacy.guarantees import epsilons as epsilons
from .privacy.guarantees import guarantee as guarantee
from .privacy.guarantees import guarantees as guarantees
from .privacy.ledger.entries import ledger as ledger
from .privacy.mechanisms import haar_bands as bands
from .privacy.mechanisms import linear_maps as linear_maps
from .privacy.mechanisms import strategies as strategies
from .privacy.mechanisms import wavelet as wavelet
from .privacy.mechanisms.chain import chain as chain
from .privacy.mechanisms.correlated import correlated as correlated
from .privacy.mechanisms.distributed import distributed as distributed
from .privacy.mechanisms.stages import bounded as bounded
from .privacy.mechanisms.stages import clip_adaptive as clip_adaptive
from .privacy.mechanisms.stages import clip_automatic as clip_automatic
from .privacy.mechanisms.stages import clip_l1 as clip_l1
from .privacy.mechanisms.stages import clip_l2 as clip_l2
from .privacy.mechanisms.stages import clip_per_layer as clip_per_layer
from .privacy.mechanisms.stages import clip_scaled as clip_scaled
from .privacy.mechanisms.stages import clip_values as clip_values
from .privacy.mechanisms.stages import divide as divide
from .privacy.mechanisms.stages import gaussian as gaussian
from .privacy.mechanisms.stages import james_stein as james_stein
from .privacy.mechanisms.stages import laplace as laplace
from .privacy.mechanisms.stages import post_process as post_process
from .privacy.mechanisms.stages import total as total
from .privacy.plain_numbers import epsilon as epsilon
from .privacy.plain_numbers import noise_multiplier as noise_multiplier
from .sampling import batches as batches
from .verify.check import check_privacy as check_privacy

# where the project is to be found; its public address is not settled
REPOSITORY = "OWNER/jfl"

# What `from jfl import *` binds.
__all__ = [
    "Algorithm",
    "AuditReport",
    "Budget",
    "Choice",
    "Context",
    "Diagnostics",
    "Federation",
    "Fn",
    "Guarantee",
    "Health",
    "HealthError",
    "Keys",
    "Mechanism",
    "MembershipReport",
    "Metric",
    "Metrics",
    "Output",
    "Plan",
    "REPOSITORY",
    "Release",
    "Rows",
    "Run",
    "Sweep",
    "Task",
    "algorithm",
    "algorithms",
    "ask_tell",
    "at_scale",
    "audit",
    "audit_membership",
    "audit_one_run",
    "auditing",
    "bands",
    "batches",
    "bounded",
    "budget",
    "calibrate",
    "callbacks",
    "chain",
    "check_privacy",
    "choose",
    "clip_adaptive",
    "clip_l1",
    "clip_automatic",
    "clip_l2",
    "clip_scaled",
    "clip_values",
    "clip_per_layer",
    "correlated",
    "corruption",
    "datasets",
    "describe",
    "distributed",
    "divide",
    "epsilon",
    "epsilons",
    "errors",
    "federate",
    "gaussian",
    "grad",
    "guarantee",
    "guarantees",
    "heterogeneity",
    "init",
    "james_stein",
    "keep_compiled_programs",
    "laplace",
    "ledger",
    "linear_maps",
    "load",  # noqa: F822  # pyright: ignore[reportUnsupportedDunderAll]  # in __init__.py
    "loggers",
    "mesh",
    "models",
    "named",
    "noise_multiplier",
    "optimizers",
    "partition",
    "plan",
    "population",
    "post_process",
    "predict",
    "private_grad",
    "public_data",
    "run_round",
    "sampling",
    "scan",
    "schedules",
    "simulate",
    "strategies",
    "sweep",
    "task",
    "total",
    "transforms",
    "wavelet",
]
