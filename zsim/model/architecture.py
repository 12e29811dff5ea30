"""The normalized configuration of a decoder: what a config.json means, whatever names its family gives the fields."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Moe:
    """Routed experts in place of the MLP."""

    experts: int
    top_k: int
    intermediate: int
    norm_top_k: bool = True  # the chosen weights are divided by their sum
    shared: int = 0  # width of the expert that every token goes through (Qwen2-MoE)
    autoep_size: int = 0  # ranks that share the experts, in DeepSpeed's own layer (AutoEP); 0: transformers' layer
    scales_queries: bool = False  # attn_temperature_tuning (Llama 4)
    noise: bool = False  # on what experts read, in training (Phi-3.5-MoE)
    groups: int = 0  # of experts, of which a token's choice is limited to the best few (DeepSeek); 0: any
    bias: bool = False  # of experts, which takes part in their choice alone (LFM2)
    latent: int = 0  # width that tokens are projected to before them (Nemotron-H); 0: they are not
    sigmoid: bool = False  # of the chosen scores, where others have their softmax (Cohere 2)
    averages: bool = False  # the result and the shared expert's (Cohere 2)
    wide_sum: bool = False  # with the shared expert's result, in float32 (Hunyuan 3)
    # A module for each, as transformers before 5 had them: "all" are called, or those that were "hit". "": one for all
    modules: str = ""


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2): queries, keys and values come out of narrow projections. Widths in
    elements; heads of queries and keys are `nope + rope` wide (`Architecture.head_dim`)."""

    query_rank: int  # 0: queries are projected at once
    key_value_rank: int
    nope: int  # part of a head without positions
    rope: int  # rotated part, of which all heads share the key's
    value: int  # width of a head of values
    interleaved: bool = True  # neighbours are rotated, not halves
    index: Index | None = None


@dataclass(frozen=True, slots=True)
class Index:
    """What chooses the tokens that a token attends to (DeepSeek-V3.2): queries and keys of their own."""

    heads: int
    head_dim: int
    top_k: int


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """Layers that pass a state on in place of attention (gated delta rule). Widths of one head in elements."""

    key_heads: int
    value_heads: int  # a multiple
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class StateSpace:
    """The mixer of Mamba-2, in place of attention or beside it. Widths in elements, `chunk` in tokens."""

    heads: int
    head_dim: int
    state: int  # of each element of a head
    groups: int  # of heads that share B and C
    chunk: int
    kernel: int  # tokens that the convolution spans
    conv_bias: bool = True
    bias: bool = False  # of the projection into it
    out_bias: bool = False  # of that out of it
    normed: bool = True  # what the gate multiplies
    norm_first: bool = False  # the gate multiplies behind the norm (Falcon-H1)

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution: what is mixed, B and C."""
        return self.inner + 2 * self.groups * self.state


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What distinguishes a layer from its neighbours."""

    sliding: bool = False  # windowed attention
    sparse: bool = False  # experts in place of the MLP
    stretch: int = 0  # of layers between those that something else than the next layer reads (Qwen3-VL)
    unread: bool = False  # of a vision tower: nothing reads its result
    crossed: bool = False  # it attends to what a tower returned (Llama 3.2 Vision)
    first: bool = False  # it has no norm before attention (ModernBERT)
    rotary: bool = True  # SmolLM3 leaves every fourth layer without positions
    # or what takes its place: "conv", a short convolution (LFM2), "delta", linear attention, "mamba", a state space,
    # "mlp" or "moe" (Nemotron-H), "hybrid", attention and a state space (Falcon-H1)
    mixer: str = "attention"
    shares_choice: bool = False  # of the tokens it attends to, with the layer before (GLM-5)
    after_choice: bool = False  # which the layer before made, and does not share itself
    cut: bool = False  # activations of its MLP below a quantile are zero (Gemma 3n)
    later: bool = False  # not the first, whose input is the embedding itself, where that shows


@dataclass(frozen=True, slots=True)
class Tiles:
    """Squares that every image of Llama 3.2 Vision has, empty ones among them."""

    most: int
    ratios: int  # shapes of images, each with embeddings of its own
    global_kinds: tuple[LayerKind, ...]  # of the layers behind the tower's
    read: tuple[int, ...]  # layers of the tower whose output the text model's reads beside the last one's


@dataclass(frozen=True, slots=True)
class Vision:
    """The tower of a vision-language model and what connects it to the text model. `blocks` are its layers: hidden,
    heads, intermediate, activation and kinds of an `Architecture`. Sizes of images and patches in pixels."""

    blocks: Architecture
    patch: int
    text: str = ""  # model_type of the text model, where it may be one of several
    channels: int = 3
    frames: int = 1  # that one patch spans (temporal_patch_size)
    merge: int = 1  # a square of patches becomes one token of the text model
    pool: int = 1  # a square of patches is averaged (Gemma 3)
    window: int = 0  # side of the windows that layers with `sliding` attend in
    image_size: int = 0  # side of every image; 0: any size
    resolutions: tuple[tuple[int, int], ...] = ()  # height and width, of which an image takes one (LLaVA-NeXT): it is
    # cut into squares of `image_size`, and a small copy of it comes before them
    splits: bool = False  # an image of another size is cut into squares, with a small copy behind them (Idefics 3)
    tiles: Tiles | None = None
    adapter: int = 0  # width of what the tower itself projects its features to (Llama 4)
    read_layers: tuple[int, ...] = ()  # whose output is added to the text model's first layers (Qwen3-VL)
    most_squares: int = 0  # features of more of them are interpolated to as many (LLaVA-OneVision)
    positions: int = 0  # rows of a learned position embedding that is interpolated
    checkpointed: bool = True  # its layers know of checkpointing
    input_embedding: bool = True  # its patch embedding is one to transformers (get_input_embeddings)
    keeps_class_token: bool = False  # and in the text model
    projector_activation: str = "gelu"
    projector_bias: bool = True
    rms_norms: bool = False  # in the tower's layers (InternVL)
    most_tokens: int = 0  # of an image, whose patches are padded to those of as many (Gemma 4)
    standardizes: bool = False  # what it returns
    clips: bool = False  # what goes into its products and comes out


@dataclass(frozen=True, slots=True)
class Sound:
    """A tower of sounds, whose parameters are there and which is given nothing (Gemma 4, Qwen's Omni)."""

    hidden: int
    layers: int
    heads: int
    outputs: int
    channels: tuple[int, int] = (0, 0)  # of Gemma 4's convolutions that come first
    kernel: int = 0  # of the convolutions in its layers
    clips: bool = False
    intermediate: int = 0  # Qwen's
    inputs: int = 0  # bins that it reads
    positions: int = 0
    between: int = 0  # channels of Qwen3-Omni's convolutions that come first


@dataclass(frozen=True, slots=True)
class Gemma4:
    """What Gemma 4 has besides. Layers of full attention have heads of a width of their own, the last layers read keys
    and values that earlier ones made, and every layer may add an embedding of its own. Widths in elements."""

    full_head_dim: int  # in layers of full attention
    full_kv_heads: int
    values_are_keys: bool = False  # in layers of full attention: one projection makes both (attention_k_eq_v)
    shared_layers: int = 0  # the last ones (num_kv_shared_layers)
    double_wide: bool = False  # these have an MLP of twice the width
    layer_width: int = 0  # of each layer's own embedding of the tokens; 0: there is none
    layer_vocab: int = 0
    streams: int = 0  # residual ones, of which a layer reads the first (Gemma 3n's altup_num_inputs)
    laurel_rank: int = 0  # of its path beside attention
    images_see_each_other: bool = False  # in layers with a window (use_bidirectional_attention: vision)


@dataclass(frozen=True, slots=True)
class Pair:
    """What a model with an encoder, which the `Architecture` is, has besides."""

    decoder: Architecture
    gated: bool = False  # MLPs (T5)
    buckets: int = 0  # rows of the embedding of distances (T5)
    scaled: bool = False  # what the decoder returns (T5)
    inputs: int = 0  # channels of what the encoder reads, which are no tokens then (Whisper)


@dataclass(frozen=True, slots=True)
class Architecture:
    """A causal decoder, in the words of `zsim.model.families`. Widths in elements, dropouts as probabilities."""

    family: str  # transformers' model_type
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    kinds: tuple[LayerKind, ...]  # one per layer
    tied: bool
    positions: int = 0  # rows of a learned position embedding; a limit elsewhere
    activation: str = "silu"
    attention_bias: bool = False  # of q, k and v
    output_bias: bool = False  # of the projection after attention
    mlp_bias: bool = False
    head_bias: bool = False  # of the projection onto the vocabulary
    qk_norm: str = ""  # "head": each head of q and k, "width": all heads together, "each": every head its own weight
    parallel: bool = False  # attention and MLP add to the same residual
    rotary_dim: int = 0  # rotated entries of a head; 0: all
    token_types: int = 0  # rows of an embedding of kinds of tokens (BERT)
    embedding_norm: bool = False  # of what the embedding returns, where that is a choice (ESM)
    token_dropout: bool = False  # masked tokens are zeros, and the others made up for them (ESM)
    embed_width: int = 0  # of the token embedding if not `hidden` (OPT 350m)
    pre_norm: bool = True
    final_norm: bool = True
    sandwich: bool = False  # norms of what attention and MLP return as well (HyperCLOVA X)
    dropout: float = 0.0  # of the residual stream
    attention_dropout: float = 0.0
    embedding_dropout: float = 0.0
    labels: int = 0  # that an encoder tells sequences apart by; 0: it fills masks
    head_dropout: float = 0.0  # before these
    window: int | None = None
    moe: Moe | None = None
    latent: Latent | None = None
    delta: LinearAttention | None = None
    softcap: bool = False  # tanh on attention logits (Gemma 2)
    final_softcap: bool = False  # tanh on logits
    norm_bias: bool = True  # of LayerNorms
    norm_affine: bool = True  # LayerNorms have a weight (OPT)
    rms_norms: bool = False  # where that is a choice (Cohere 2's experts)
    two_norms: bool = False  # attention and MLP, though parallel, have norms of their own (Falcon 40b)
    grouped: bool = False  # fused qkv lies by key head (Falcon 40b)
    clip_qkv: bool = False  # MPT
    residual_after_norm: bool = False  # BLOOM
    vision: Vision | None = None
    seq2seq: Pair | None = None
    gemma4: Gemma4 | None = None
    sound: Sound | None = None
    conv_kernel: int = 0  # tokens that a short convolution spans
    conv_bias: bool = False
    mamba: StateSpace | None = None
    rotary: bool = True  # layers with attention rotate queries and keys
    wide_residual: bool = False  # the residual stream is float32
    scaled_embedding: bool = False  # what the embedding returns is multiplied, where that is a choice (AFMoE)
    remainder: int = 0  # of a bare parameter count: a vector that makes the count exact

    @property
    def experts(self) -> Moe:
        """The experts of a model that has them."""
        assert self.moe is not None
        return self.moe

    @property
    def mla(self) -> Latent:
        """The ranks and widths of a model with latent attention."""
        assert self.latent is not None
        return self.latent

    @property
    def linear(self) -> LinearAttention:
        """Heads and widths of a model with linear attention."""
        assert self.delta is not None
        return self.delta

    @property
    def gemma(self) -> Gemma4:
        """What a Gemma 4 has besides."""
        assert self.gemma4 is not None
        return self.gemma4

    @property
    def space(self) -> StateSpace:
        """Heads and widths of a model with a state space."""
        assert self.mamba is not None
        return self.mamba

    @property
    def pair(self) -> Pair:
        """The decoder of a model with an encoder, and what both have."""
        assert self.seq2seq is not None
        return self.seq2seq

    @property
    def layers(self) -> int:
        return len(self.kinds)
