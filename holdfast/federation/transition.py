"""How a client learns that new classes have come."""

from holdfast.data.schedule import Plan


class Told:
    """The schedule tells every client in the very round; the other detectors will have only entropies to go by."""

    def noticed(self, plan: Plan, number: int) -> list[int]:
        """The clients that learn in this round that their data has changed."""
        return [client for client, _ in plan.arriving.get(number, [])]
