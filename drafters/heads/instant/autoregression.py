"""Linear prediction of the target's next hidden states from its last ones, learned in closed form while it is used.

The hidden states of a text are treated as a vector autoregression: each of the next k states is a linear map of the
last p states, by ridge regression. All that the regression needs are covariances of states j positions apart, for j
k + p: one product per text adds them, and no state is stored. With p = 2 learning costs D^2 (k + 2) multiplications
per token, and one Cholesky factorisation per solution. The target's LM head turns predicted states
into tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from mmspec.learning.protocols import Examples

NUM_LAGS = 2
"""p, states that are read: the last one and the one before."""
NUM_SLOTS = 4
"""k, states that are predicted."""
MAX_INPUT_SIZE = 768
"""Larger states are projected to so many numbers by a fixed random matrix before they are read."""
RANK = 96
"""R, directions of the predicted states that are predicted: a draft reads all weights of the heads."""
SUBSPACE_ITERATIONS = 2
MAX_DRAFTED_IDS = 4096
"""Largest number of tokens that are drafted, the most frequent ones."""
RIDGE_PENALTY = 0.01
"""Weight of the squared weights, as a fraction of the mean variance of an input."""
RIDGE_EXAMPLES = 2000
"""With fewer positions than this the weight is larger in proportion."""
MAX_WEIGHT = 1 << 16
"""When the sums hold so many positions they are halved: older texts count less."""


@dataclass(frozen=True)
class LinearHeads:
    """The learned maps, never written to: the state of slot j is `means[j] + basis @ z[j]`, where z = weight x + bias.

    Attributes:
        weight: [k R, p r] float32; the inputs x are the states at t - 1, then those at t.
        bias: [k R] float32.
        basis: [D, R] float32, orthonormal: the directions in which predictions differ.
        means: [k, D] float32.
        candidate_ids: [V'] int64, the tokens that are drafted.
        frequencies: [V'] float32, the share of each of them in the text.
        num_examples: positions that it was learned from.
    """

    weight: Tensor
    bias: Tensor
    basis: Tensor
    means: Tensor
    candidate_ids: Tensor
    frequencies: Tensor
    num_examples: int

    def state_dict(self) -> dict[str, Tensor]:
        """As stored on disk."""
        tensors = {item.name: getattr(self, item.name) for item in fields(self)}
        return tensors | {"num_examples": torch.tensor(self.num_examples)}

    def to(self, device: torch.device) -> LinearHeads:
        """Itself, or a copy on another device."""
        if self.weight.device == self.candidate_ids.device == device:
            return self
        tensors = {item.name: getattr(self, item.name).to(device) for item in fields(self)[:-1]}
        return replace(self, **tensors)


def input_projection(hidden_size: int) -> Tensor | None:
    """[D, r] float32, the same in every process; None if states are read as they are."""
    if hidden_size <= MAX_INPUT_SIZE:
        return None
    rng = torch.Generator().manual_seed(0)
    sizes = hidden_size, MAX_INPUT_SIZE
    return torch.randn(sizes, generator=rng, device="cpu", dtype=torch.float32) * hidden_size**-0.5


class AutoregressionFit:
    """The sums over all texts so far, and the solution of the regression.

    A text of n states has n - k - 1 positions t with a state before and k states after. The products of the state at
    t - 1 with those at t - 1 + j are summed over these positions. The products of the state at t with those at t + j
    are the same but for the first and the last position of a text, so only the difference is summed (`_edges`).

    Attributes:
        num_examples: positions in the sums.
    """

    def __init__(self, hidden_size: int, vocab_size: int, device: torch.device) -> None:
        projection = input_projection(hidden_size)
        self.projection = None if projection is None else projection.to(device)
        self.num_examples = 0
        self._input_size = min(hidden_size, MAX_INPUT_SIZE)
        self._hidden_size = hidden_size
        self._products = torch.zeros(
            self._input_size, (NUM_SLOTS + 2) * hidden_size, device=device, dtype=torch.float32
        )
        self._edges = torch.zeros(self._input_size, (NUM_SLOTS + 1) * hidden_size, device=device, dtype=torch.float32)
        self._sums = torch.zeros(NUM_SLOTS + 2, hidden_size, device=device, dtype=torch.float32)
        self._weight = 0.0
        self._token_counts = torch.zeros(vocab_size, device=device, dtype=torch.float32)

    @property
    def is_determined(self) -> bool:
        """Whether there are as many positions as inputs."""
        return self.num_examples >= NUM_LAGS * self._input_size

    @torch.no_grad()
    def add(self, examples: Examples) -> None:
        """Add the positions of one call, in the order of the text (`Examples.next_ids`).

        Texts with a value that is not finite are left out, and so are texts of less than k + 2 tokens.
        """
        device = self._products.device
        states = examples.inputs.to(device, torch.float32)
        ends = (examples.next_ids[:, 0] < 0).nonzero()[:, 0].tolist()
        texts = torch.tensor_split(states, [end + 1 for end in ends]) if ends else (states,)
        for text in texts:
            if len(text) >= NUM_SLOTS + 2 and bool(torch.isfinite(text).all()):
                self._add_text(text)
        ids = examples.root_ids.to(device)
        ids = ids[(ids >= 0) & (ids < len(self._token_counts))]
        self._token_counts.index_add_(0, ids, torch.ones(len(ids), device=device, dtype=torch.float32))

    def _add_text(self, states: Tensor) -> None:
        """[n, D] the states of one text."""
        inputs = states if self.projection is None else states @ self.projection
        length = len(states) - NUM_SLOTS - 1
        windows = states.unfold(0, NUM_SLOTS + 2, 1).transpose(1, 2)  # [length, k + 2, D], from t - 1 on
        self._products.addmm_(inputs[:length].t(), windows.flatten(1))
        ends = torch.stack((-inputs[0], inputs[length]))
        self._edges.addmm_(ends.t(), torch.stack((states[: NUM_SLOTS + 1], states[length:])).flatten(1))
        self._sums += windows.sum(0)
        self._weight += length
        self.num_examples += length
        if self._weight > MAX_WEIGHT:
            for sums in (self._products, self._edges, self._sums, self._token_counts):
                sums *= 0.5
            self._weight *= 0.5

    @torch.no_grad()
    def solve(self) -> dict[str, Tensor] | None:
        """`LinearHeads.state_dict` of the solution; None if there is no finite one."""
        if not self._weight:
            return None
        means = self._sums / self._weight  # of the states at t - 1, t, ..., t + k
        input_means = means[:NUM_LAGS] if self.projection is None else means[:NUM_LAGS] @ self.projection
        products = self._products.view(self._input_size, NUM_SLOTS + 2, self._hidden_size) / self._weight
        edges = self._edges.view(self._input_size, NUM_SLOTS + 1, self._hidden_size) / self._weight
        before = products - input_means[0][:, None, None] * means  # covariances of the input at t - 1
        now = products[:, :-1] + edges - input_means[1][:, None, None] * means[1:]  # of the input at t
        solution = self._solve(before, now)
        if solution is None or not all(bool(torch.isfinite(part).all()) for part in solution):
            return None
        weight, basis = solution
        bias = -(weight @ input_means.flatten())
        found = self._token_counts.topk(min(MAX_DRAFTED_IDS, len(self._token_counts)))
        candidate_ids = found.indices[found.values > 0].sort().values
        frequencies = self._token_counts[candidate_ids] / self._token_counts.sum()
        heads = LinearHeads(weight, bias, basis, means[NUM_LAGS:], candidate_ids, frequencies, self.num_examples)
        return heads.state_dict()

    def _solve(self, before: Tensor, now: Tensor) -> tuple[Tensor, Tensor] | None:
        """The ridge solution of reduced rank: `weight` and `basis` of `LinearHeads`; None if it is singular.

        Args:
            before: [r, k + 2, D] covariances of the input at t - 1 with the states at t - 1, ..., t + k.
            now: [r, k + 1, D] covariances of the input at t with the states at t, ..., t + k.
        """
        first, second = before[:, :NUM_LAGS], now[:, :1]
        if self.projection is not None:
            first, second = first @ self.projection, second @ self.projection
        cross = first[:, 1]
        gram = torch.cat((torch.cat((first[:, 0], cross), dim=1), torch.cat((cross.t(), second[:, 0]), dim=1)))
        targets = torch.cat((before[:, NUM_LAGS:], now[:, 1:])).flatten(1)
        gram.diagonal().add_(RIDGE_PENALTY * (1 + RIDGE_EXAMPLES / self.num_examples) * gram.diagonal().mean())
        factor, info = torch.linalg.cholesky_ex(gram)
        if bool(info):
            return None
        maps = torch.cholesky_solve(targets, factor).unflatten(1, (NUM_SLOTS, -1)).permute(1, 2, 0)  # [k, D, 2 r]
        basis = _principal_basis(maps, targets.unflatten(1, (NUM_SLOTS, -1)).transpose(0, 1))
        return (basis.t() @ maps).flatten(0, 1).contiguous(), basis


def _principal_basis(maps: Tensor, covariances: Tensor) -> Tensor:
    """[D, R] orthonormal, the directions in which the predictions vary most, by subspace iteration.

    Args:
        maps: [k, D, 2 r] from inputs to predictions.
        covariances: [k, 2 r, D] of inputs and states, whose product with `maps` is the covariance of the predictions.
    """
    size = maps.shape[1]
    rng = torch.Generator().manual_seed(0)
    shape = size, min(RANK, size)
    basis = torch.randn(shape, generator=rng, device="cpu", dtype=torch.float32).to(maps.device)
    for _ in range(SUBSPACE_ITERATIONS):
        basis = torch.linalg.qr((maps @ (covariances @ basis)).sum(0)).Q
    return basis
