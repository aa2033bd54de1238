"""Tensor names of mixtures of experts, and the layout of tensors that stack them."""

from dataclasses import dataclass

__all__ = ["ExpertStack", "ExpertTensorNames"]


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """Layout of a tensor that stacks the weights of all experts."""

    transposed: bool = False
    """True if it is [experts, inputs, outputs] rather than [experts, outputs, inputs]"""
    alternates: bool = False
    """True if outputs of gate and up alternate; False: all outputs of the gate come first"""
    in_any_order: bool = False
    """True if some programs' files hold the last two dimensions in the other order"""
    suffix: str = ""
    """End of the tensor's name"""
    is_flat: bool = False
    """True if experts are rows of one matrix: gate and up of [experts * outputs, inputs] each, and
    down [experts * inputs, outputs]"""


@dataclass(frozen=True, slots=True)
class ExpertTensorNames:
    """Tensor names of a mixture of experts; "{}" stands for the number of an expert."""

    router: str
    gate: tuple[str, ...]
    down: str
    """Down projection of an expert, or without "{}" the tensor that stacks those of all experts"""
    stack: ExpertStack = ExpertStack()
    """Layout of the tensors that stack all experts"""
    shared_gate: tuple[str, ...] = ()
    """Gate and up of the expert that every token has; empty: there is no such expert"""
    shared_down: str = ""
    shared_router: str = ""
    """Product whose sigmoid is the factor of the shared expert; empty: there is no factor"""
    shared_stack: tuple[str, ...] = ()
    """Full names of the stacks of shared experts that the router weighs, in the layout of `stack`:
    gate and up apart or together, then down; empty: there are no such experts"""
    module: str = "mlp"
    """Module of router and experts in transformers 5, whose names adapters have"""
    choice_bias: str = ""
    """Bias that is added to the weights for the choice alone; empty: there is none"""
    choice_bias_is_row: bool = True
    """True if the file stores `choice_bias` as [1, experts], False for [experts]"""
    by_token: str = ""
    """Full name of the table with the experts of each token id; empty: there is none"""
    router_name: str = ""
    """The router's name in that module; empty: the last part of `router`"""
    output_bias: str = ""
    """Full name of a bias of the sum of a token's experts, which files may have; empty: none has"""

    @property
    def are_stacked(self) -> bool:
        return "{}" not in self.down

    @property
    def router_module(self) -> str:
        """The router's name in transformers 5."""
        return f"{self.module}.{self.router_name or self.router.rpartition('.')[2]}"
