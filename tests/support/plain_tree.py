"""A sum tree as a list, with a loop from each leaf to the root and back."""


class PlainTree:
    """Numbers of `size` leaves. `nodes[1]` is the root, `nodes[i]` the sum of `nodes[2 * i]` and `nodes[2 * i + 1]`."""

    def __init__(self, size: int):
        self.size = size
        self.nodes = [0.0] * (2 * size)

    def set(self, leaf: int, priority: float) -> None:
        node = leaf + self.size
        self.nodes[node] = priority
        while node > 1:
            node //= 2
            self.nodes[node] = self.nodes[2 * node] + self.nodes[2 * node + 1]

    def find(self, mass: float) -> int:
        node = 1
        while node < self.size:
            left, right = self.nodes[2 * node], self.nodes[2 * node + 1]
            node = 2 * node
            if mass >= left and right > 0.0:
                mass, node = mass - left, node + 1
        return node - self.size
