"""What server, proxy and sites make of their agreement, each for itself and all the same."""

import logging
import sys
from dataclasses import replace
from pathlib import Path

import torch

from holdfast.data import folder
from holdfast.deploy.settings import Agreement
from holdfast.experiment import enrolment_of
from holdfast.methods.roles import PrototypeSelection
from holdfast.models.incremental import ModelSpec
from holdfast.models.transform import Transform
from holdfast.protocol.enrolment import Enrolment
from holdfast.proxy.prototype_server import SelectorSetup

CPU = torch.device("cpu")


def setup_of(agreement: Agreement, seed: int, device: torch.device = CPU) -> SelectorSetup:
    """The network and the normalisation of a federation; `seed` is the selector's own."""
    config = agreement.config
    assert config.data.size is not None
    spec = ModelSpec(config.model.name, config.model.norm, config.data.size, config.model.width)
    transform = Transform(folder.MEAN, folder.STD, bool(config.data.flip))
    return SelectorSetup(spec, transform, agreement.classes, seed, device)


def site_enrolment(agreement: Agreement, number: int) -> Enrolment:
    """What a site works by; it builds it from its kit, so that no server can tell it anything else."""
    config = agreement.config
    return replace(enrolment_of(config, setup_of(agreement, config.seed)), client=number)


def has_proxy(agreement: Agreement) -> bool:
    """Does the method need the proxy?"""
    return isinstance(agreement.config.method.teacher_selection(), PrototypeSelection)


def log_to(file: Path | None = None) -> None:
    """One line per event on standard error, for a service manager's journal."""
    handler: logging.Handler = logging.FileHandler(file) if file else logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger = logging.getLogger("holdfast.deploy")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for noisy in ("httpx", "httpcore", "flwr", "uvicorn", "alembic", "grpc"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
