"""The public door of sampling: `Sampler`, the draws and the processors that it is made of."""

from fuseboard.engine.sampling.draws import (
    DrawError,
    draws_without_waiting,
    multinomial1,
    multinomial_draws,
    new_invalid,
    raise_if_invalid,
)
from fuseboard.engine.sampling.processors import (
    mark_seen,
    min_new_tokens,
    min_p,
    repetition_penalty,
    repetition_penalty_seen,
    seen_mask,
    suppress,
    temperature,
    token_mask,
    top_k,
    top_p,
)
from fuseboard.engine.sampling.sampler import (
    Sampler,
)
from fuseboard.engine.sampling.state import (
    State,
    Step,
)

__all__ = [
    "DrawError",
    "Sampler",
    "State",
    "Step",
    "draws_without_waiting",
    "mark_seen",
    "min_new_tokens",
    "min_p",
    "multinomial1",
    "multinomial_draws",
    "new_invalid",
    "raise_if_invalid",
    "repetition_penalty",
    "repetition_penalty_seen",
    "seen_mask",
    "suppress",
    "temperature",
    "token_mask",
    "top_k",
    "top_p",
]
