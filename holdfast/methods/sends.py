"""What the clients of a method send, and to whom, by what the method declares."""

from holdfast.methods.base import Method
from holdfast.protocol.messages import Phase

PHASES: dict[Phase, str] = {"begin": "at a task's start", "finish": "at a task's end"}


def sends(method: Method) -> dict[str, list[str]]:
    """By receiver: what a client of this method sends the global server and the proxy."""
    when = " and ".join(text for phase, text in PHASES.items() if method.collects_extras(phase))
    server = ["its model", *([f"{method.extras_are} {when}"] if when else [])]
    sharing = method.prototypes()
    image = "a perturbed image" if sharing and sharing.perturbation else "an image"
    return {"server": server, "proxy": [f"the gradient of {image} of each new class"] if sharing else []}


def sends_line(method: Method) -> str:
    """The same in one line."""
    return "; ".join(f"{receiver}: {', '.join(parts)}" for receiver, parts in sends(method).items() if parts)
