"""Formats in which a checkpoint holds MTP layers: names, shapes and tensors."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from services.engine.model.architecture.latent_spec import LatentSpec
from services.engine.model.architecture.layers import AttentionSpec, DenseSpec, LayerSpec
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.checkpoint.tensors import StoredTensor, TensorFiles
from services.engine.model.manifest import StoredLayer, stored_layer
from services.engine.model.parts.stored import LayerNames, StoredLinear, StoredNorm
from services.engine.model.parts.stored_feed_forward import StoredExperts

__all__ = ["MtpFormat", "StoredMtpLayer", "find_format", "mtp_spec", "stored_layers"]


_LIKE_FIRST = {"Exaone4_5_ForConditionalGeneration"}
"""Families whose MTP layer has the attention of the model's first layer. Source: SGLang's code,
which LG AI Research wrote"""


@dataclass(frozen=True, slots=True)
class MtpFormat:
    """Names of MTP layers' tensors, without .weight, and the layers' inputs."""

    root: str
    """Beginning of all names"""
    layers: str
    """Name between the root and a layer's number"""
    number: int
    """Number of the first layer"""
    projection: str
    embedding_norm: str
    states_norm: str
    final_norm: str
    inputs: str = "{layers}.{number}."
    """Beginning of the names above, behind the root"""
    embedding: str = ""
    """Table of the embeddings that a file may hold for a layer; empty: none has one"""
    output: str = ""
    """Output projection that a file may hold for a layer; empty: none has one"""
    feed_forward_norm: str = ""
    """Norm in front of the feed-forward layer; empty: it has the name of the model's layers"""
    may_share_norm: bool = False
    """True if files without the last norm share that of the model"""
    states_first: bool = False
    """True if the product reads the hidden states before the embedding"""
    has_windows: bool = False
    """True if the layers have the model's windows, and dense feed-forward layers"""
    norms_states: bool = True
    """True if the layers read hidden states behind the final norm"""
    is_chained: bool = True
    """True if each layer but the first reads the output of the one before; False: all read hidden
    states of the model"""

    def prefix(self, depth: int) -> str:
        """Return the beginning of the names of a layer's inputs. depth: from 0."""
        return self.root + self.inputs.format(layers=self.layers, number=self.number + depth)

    def holds(self, files: TensorFiles, depth: int) -> bool:
        """Return whether files hold a layer. depth: from 0."""
        return files.holds(f"{self.prefix(depth)}{self.states_norm}.weight")

    def count(self, files: TensorFiles) -> int:
        """Return how many layers files hold, at least 1."""
        count = 1
        while self.prefix(count) != self.prefix(0) and self.holds(files, count):
            count += 1
        return count


@dataclass(frozen=True, slots=True)
class StoredMtpLayer:
    """Tensors of an MTP layer."""

    projection: StoredLinear
    embedding_norm: StoredNorm
    states_norm: StoredNorm
    final_norm: StoredNorm | None
    """Norm in front of the logits; None: that of the model"""
    layer: StoredLayer
    embedding: StoredTensor | None
    """Table of embeddings; None: the file has none for the layer"""
    output: StoredTensor | None
    """Output projection; None: the file has none for the layer"""


def find_format(files: TensorFiles, spec: ModelSpec) -> MtpFormat | None:
    """Return the format of the MTP layers that files hold; None: they hold none."""
    return next((each for each in _formats(spec) if each.holds(files, 0)), None)


def stored_layers(
    spec: ModelSpec, files: TensorFiles, found: MtpFormat
) -> tuple[StoredMtpLayer, ...]:
    """List the tensors of each layer. spec: shape of the layers."""
    return tuple(_stored(spec, files, found, depth) for depth in range(spec.num_layers))


def mtp_spec(files: TensorFiles, whole: ModelSpec, found: MtpFormat) -> ModelSpec:
    """Return the shape of the layers. Raises CheckpointError for a model without such layers."""
    has_windows = found.has_windows or whole.draft_layers_have_windows
    layer = _windowed_layer(whole) if has_windows else _whole_layer(whole)
    names = replace(whole.family.names, layers=found.layers)
    if found.feed_forward_norm:
        names = replace(names, feed_forward_norm=found.feed_forward_norm)
    stacked = names.stacked_experts
    prefix = f"{found.root}{found.layers}.{found.number}."
    if stacked is not None and files.holds(f"{prefix}{stacked.down}"):
        names = replace(names, experts=stacked)
    numbers = range(found.number, found.number + found.count(files))
    spec = replace(
        whole,
        family=replace(whole.family, names=names),
        layers=tuple(replace(layer, place=str(number)) for number in numbers),
    )
    dense = _first_dense(whole)
    if dense is None or _holds_router(files, spec, found):
        return spec
    return replace(spec, layers=tuple(replace(each, feed_forward=dense) for each in spec.layers))


def _formats(spec: ModelSpec) -> Iterator[MtpFormat]:
    """Yield the formats in which files may hold the layers."""
    layers, number = spec.family.names.layers, spec.num_layers
    norms = ("nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm")  # of GGUF files
    yield MtpFormat(
        "",
        layers,
        number,
        "nextn.eh_proj",
        *norms,
        embedding="nextn.embed_tokens",
        output="nextn.shared_head_head",
        may_share_norm=True,
    )
    for root in spec.family.names.roots:
        norms = ("enorm", "hnorm", "shared_head.norm")  # of DeepSeek V3 and GLM-4.5
        yield MtpFormat(
            root,
            layers,
            number,
            "eh_proj",
            *norms,
            embedding="embed_tokens",
            output="shared_head.head",
        )
    if spec.family.has_mimo_keys:
        for root in spec.family.names.roots:
            yield _mimo_v2_format(root)
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")  # of MiMo
    for root in spec.family.names.roots:
        yield MtpFormat(root, "mtp_layers", 0, "input_proj", *norms, states_first=True)
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")  # of Qwen3-Next, K-EXAONE
    yield MtpFormat("mtp.", "layers", 0, "fc", *norms, inputs="")


def _mimo_v2_format(root: str) -> MtpFormat:
    """Return the format of MiMo V2 Flash. Source: SGLang's code, which its authors wrote."""
    return MtpFormat(
        root,
        "mtp.layers",
        0,
        "eh_proj",
        "enorm",
        "hnorm",
        "final_layernorm",
        feed_forward_norm="pre_mlp_layernorm",
        has_windows=True,
        norms_states=False,
        is_chained=False,
    )


def _stored(spec: ModelSpec, files: TensorFiles, found: MtpFormat, depth: int) -> StoredMtpLayer:
    names = LayerNames(spec, found.prefix(depth))
    width = spec.hidden_size
    has_norm = files.holds(f"{found.prefix(depth)}{found.final_norm}.weight")
    shares_norm = found.may_share_norm and not has_norm
    vocabulary = spec.stored_vocab_size or spec.vocab_size

    def table(name: str) -> StoredTensor | None:
        held = name and files.holds(f"{found.prefix(depth)}{name}.weight")
        return names.tensor(f"{name}.weight", vocabulary, width) if held else None

    return StoredMtpLayer(
        projection=names.linear((found.projection,), (width,), 2 * width, False),
        embedding_norm=names.required_norm(found.embedding_norm),
        states_norm=names.required_norm(found.states_norm),
        final_norm=None if shares_norm else names.required_norm(found.final_norm),
        layer=stored_layer(spec, depth, found.root),
        embedding=table(found.embedding),
        output=table(found.output),
    )


def _whole_layer(whole: ModelSpec) -> LayerSpec:
    """Return the model's last layer of full attention, or the first layer if MTP is like it."""
    if whole.architecture in _LIKE_FIRST:
        return whole.layers[0]
    layer = next((each for each in reversed(whole.layers) if _sees_all(each)), None)
    if layer is None:
        raise CheckpointError("no layer of the model sees all tokens, as an MTP layer does.")
    return layer


def _windowed_layer(whole: ModelSpec) -> LayerSpec:
    """Return a layer with the model's windows, and with its dense feed-forward layer."""
    windowed = next((each for each in whole.layers if _has_window(each)), None)
    dense = _first_dense(whole)
    if windowed is None or dense is None:
        raise CheckpointError(
            "an MTP layer has a window and a dense feed-forward layer, and the model has no layer "
            f"with {'a window' if windowed is None else 'such a feed-forward layer'}."
        )
    return replace(windowed, feed_forward=dense)


def _first_dense(whole: ModelSpec) -> DenseSpec | None:
    """Return the shape of the model's first dense feed-forward layer; None: it has none."""
    parts = (each.feed_forward for each in whole.layers)
    return next((part for part in parts if isinstance(part, DenseSpec)), None)


def _holds_router(files: TensorFiles, spec: ModelSpec, found: MtpFormat) -> bool:
    """Return whether files hold the router of the first layer. K-EXAONE's has no experts."""
    stored = stored_layer(spec, 0, found.root).feed_forward
    if not isinstance(stored, StoredExperts):
        return False
    return all(files.holds(each.name) for each in stored.router.weights)


def _sees_all(layer: LayerSpec) -> bool:
    mixer = layer.mixer
    return isinstance(mixer, LatentSpec) or (isinstance(mixer, AttentionSpec) and not mixer.window)


def _has_window(layer: LayerSpec) -> bool:
    return isinstance(layer.mixer, AttentionSpec) and layer.mixer.window > 0
