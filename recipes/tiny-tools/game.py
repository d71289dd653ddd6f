"""An environment: a class with a reset, whose other public methods are the tools of the model."""


class LostParcel:
    """A parcel travels from city to city, and only the city that it has left knows where it went."""

    def reset(self, route: list[str], **row: object) -> str:
        """Begin a game, and return what the model is told first.

        Args:
            route: the column of the dataset: the cities, of which the last has the parcel.
            row: the other columns.
        """
        self._route, self._is_found = route, False
        return f"\nIt was in {route[0]}."

    def ask(self, city: str) -> str:
        """Ask in a city for the parcel.

        Args:
            city: The name of the city.
        """
        if city not in self._route:
            return "No."
        number = self._route.index(city) + 1
        if number < len(self._route):
            return f"It went to {self._route[number]}."
        self._is_found = True
        return "It is here."

    def get_reward(self) -> float:
        """1 if the parcel was found."""
        return float(self._is_found)
