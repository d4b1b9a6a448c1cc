"""Mistakes that porters make, as edits of the text of a port: the file that is verified has the mistake.

A mistake in a class is in each layer, as in somebody's own file, so each layer's module is a right answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tests.zoo.entry import Kind

_HERE: Final = Path(__file__).parent
_ADAPTED: Final = (
    "        result[name] = weight.to(TORCH_DTYPES[dtype]).contiguous()\n"  # a line of both adapters
)
PORTS: Final = ("encoder", "mixture")


@dataclass(frozen=True)
class Mistake:
    """A mistake in one module of a port.

    Attributes:
        name: Of the entry.
        port: The module of this package that it is made in.
        guilty: Site of the reference whose counterpart computes something else.
        kind: What a diagnosis should call it, as in the zoo.
        in_words: What the porter did.
        edits: Texts that stand once in the port's file, and what stands there instead.
        is_in_weights: Whether the graph is right, and what it is given is not.
        also: Further sites that are as right an answer.
        also_kinds: Further kinds that are true of it.
    """

    name: str
    port: str
    guilty: str
    kind: Kind
    in_words: str
    edits: tuple[tuple[str, str], ...]
    is_in_weights: bool = False
    also: tuple[str, ...] = ()
    also_kinds: tuple[Kind, ...] = ()

    def source(self) -> str:
        """The text of the port's file with the mistake in it.

        Raises:
            ValueError: A text to replace does not stand there once.
        """
        text = source(self.port)
        for before, after in self.edits:
            if text.count(before) != 1:
                raise ValueError(
                    f"{self.name}: {before!r} stands {text.count(before)} times in {self.port}.py"
                )
            text = text.replace(before, after)
        return text


def source(port: str) -> str:
    """The text of a right port."""
    return (_HERE / f"{port}.py").read_text(encoding="utf-8")


def _layers(*templates: str) -> tuple[str, ...]:
    """Sites of both layers, without the first that is named as the guilty one."""
    return tuple(t.format(at) for at in range(2) for t in templates)[1:]


_BERT_ATTENTION: Final = ("encoder.layer.{}.attention.self", "encoder.layer.{}.attention")
_ROTATION: Final = (
    "model.layers.{}.self_attn",
    "stages.{}.attention.rotary",  # of the port alone
    "model.layers.{}.self_attn.rotary",
)

_ENCODER: Final = (
    Mistake(
        "epsilon",
        "encoder",
        "embeddings.LayerNorm",
        "norm_eps",
        "the epsilon of the first norm is MAX's default, 1e-5, not the configuration's 1e-12",
        (
            (
                "self.scale = LayerNorm(size, [CPU], dtype, eps=config.layer_norm_eps)",
                "self.scale = LayerNorm(size, [CPU], dtype)",
            ),
        ),
    ),
    Mistake(
        "quick_gelu",
        "encoder",
        "encoder.layer.0.intermediate.intermediate_act_fn",
        "activation",
        "GELU by a sigmoid, not exact",
        (("ops.gelu(self.expand(x))", 'ops.gelu(self.expand(x), approximate="quick")'),),
        also=_layers("encoder.layer.{}.intermediate.intermediate_act_fn", "encoder.layer.{}.intermediate"),
    ),
    Mistake(
        "no_padding_mask",
        "encoder",
        "encoder.layer.0.attention.self",
        "mask",
        "padding is attended to",
        (("        scores = scores + penalty\n", ""),),
        also=_layers(*_BERT_ATTENTION),
        also_kinds=("padding",),
    ),
    Mistake(
        "residual_of_the_block",
        "encoder",
        "encoder.layer.0.output",
        "residual",
        "the feed-forward is added to what the block is given, not to what it transforms",
        (("self.ffn_norm(mixed + self.ffn(mixed))", "self.ffn_norm(x + self.ffn(mixed))"),),
        also=_layers("encoder.layer.{}.output", "encoder.layer.{}"),
        also_kinds=("wiring",),
    ),
    Mistake(
        "forgotten_bias",
        "encoder",
        "encoder.layer.0.attention.output.dense",
        "bias",
        "the last linear layer of attention has no bias, and the loader does not mind",
        (
            (
                "self.merge = Linear(size, size, dtype, CPU, has_bias=True)",
                "self.merge = Linear(size, size, dtype, CPU)",
            ),
            ("weight_alignment=1)", "weight_alignment=1, strict=False)"),
        ),
        also=_layers("encoder.layer.{}.attention.output.dense"),
    ),
    Mistake(
        "places_from_two",
        "encoder",
        "embeddings",
        "position",
        "positions begin at 2, as RoBERTa's do",
        (("np.arange(int(tokens.shape[0]))", "np.arange(2, int(tokens.shape[0]) + 2)"),),
        also=("embeddings.position_embeddings",),
        also_kinds=("offset", "shift"),
    ),
    Mistake(
        "no_segments",
        "encoder",
        "embeddings",
        "missing_module",
        "embeddings of token types are not added",
        (("self.word(tokens) + self.segment(segments)", "self.word(tokens)"),),
        also=("embeddings.token_type_embeddings",),
        also_kinds=("residual", "wiring"),
    ),
    Mistake(
        "last_token_pooled",
        "encoder",
        "pooler",
        "pooling",
        "the last token stands for the text, not the first",
        (("x[0:1, :]", "x[-1:, :]"),),
        also_kinds=("shift", "wiring"),
    ),
    Mistake(
        "queries_for_keys",
        "encoder",
        "encoder.layer.0.attention.self.query",
        "other_weights",
        "queries have the weights of keys, and keys those of queries",
        (
            ('".attention.self.query.": ".mixer.to_q."', '".attention.self.query.": ".mixer.to_k."'),
            ('".attention.self.key.": ".mixer.to_k."', '".attention.self.key.": ".mixer.to_q."'),
        ),
        is_in_weights=True,
        also=_layers("encoder.layer.{}.attention.self.query", "encoder.layer.{}.attention.self.key"),
        also_kinds=("permutation", "wiring"),
    ),
    Mistake(
        "weight_of_layer_0",
        "encoder",
        "encoder.layer.1.output.dense",
        "other_weights",
        "a matrix of the last layer is loaded from the first",
        (
            (
                "    return result\n",
                '    result["blocks.1.ffn.shrink.weight"] = result["blocks.0.ffn.shrink.weight"]\n'
                "    return result\n",
            ),
        ),
        is_in_weights=True,
    ),
)

_MIXTURE: Final = (
    Mistake(
        "scale_of_the_model",
        "mixture",
        "model.layers.0.self_attn",
        "factor",
        "scores are divided by the root of the hidden size, not of a head's",
        (("(1 / math.sqrt(self.head_size))", "(1 / math.sqrt(int(x.shape[1])))"),),
        also=_layers("model.layers.{}.self_attn"),
    ),
    Mistake(
        "rotary_neighbours",
        "mixture",
        "model.layers.0.self_attn",
        "rope",
        "each feature is rotated with its neighbour, not with that of the other half",
        (
            (
                "        a, b = x[:, :, : self.half], x[:, :, self.half :]\n",
                "        pairs = ops.reshape(x, [x.shape[0], x.shape[1], self.half, 2])\n"
                "        a, b = pairs[:, :, :, 0], pairs[:, :, :, 1]\n",
            ),
            (
                "ops.concat([a * cos - b * sin, b * cos + a * sin], -1)",
                "ops.reshape(ops.stack([a * cos - b * sin, b * cos + a * sin], -1), x.shape)",
            ),
        ),
        also=_layers(*_ROTATION),
        also_kinds=("permutation",),
    ),
    Mistake(
        "rotary_base",
        "mixture",
        "model.layers.0.self_attn",
        "rope",
        "the base of rotary positions is Llama's 10000, not the configuration's million",
        (('config.rope_parameters["rope_theta"]', "10000.0"),),
        also=_layers(*_ROTATION),
        also_kinds=("frequencies",),
    ),
    Mistake(
        "next_token_seen",
        "mixture",
        "model.layers.0.self_attn",
        "mask",
        "the causal mask begins one token late: each token sees the next",
        (("np.float32), 1)", "np.float32), 2)"),),
        also=_layers("model.layers.{}.self_attn"),
    ),
    Mistake(
        "shares_not_normalized",
        "mixture",
        "model.layers.0.mlp.gate",
        "router_order",
        "shares of the chosen experts do not add up to 1",
        (("        share = share / ops.sum(share, -1)\n", ""),),
        also=_layers("model.layers.{}.mlp.gate"),
        also_kinds=("factor",),
    ),
    Mistake(
        "normalized_residual",
        "mixture",
        "model.layers.0",
        "residual",
        "the experts are added to what they are given, after the norm and not before it",
        (("return x + self.moe(normed)", "return normed + self.moe(normed)"),),
        also=_layers("model.layers.{}"),
        also_kinds=("wiring",),
    ),
    Mistake(
        "transposed_matrix",
        "mixture",
        "model.layers.0.self_attn.o_proj",
        "transposition",
        "the last matrix of attention is transposed while it is converted; it is square",
        ((_ADAPTED, f'        weight = weight.T if name.endswith(".wo.weight") else weight\n{_ADAPTED}'),),
        is_in_weights=True,
        also=_layers("model.layers.{}.self_attn.o_proj"),
    ),
    Mistake(
        "experts_from_one",
        "mixture",
        "model.layers.0.mlp.experts",
        "expert_order",
        "experts are counted from 1, so that each has the weights of the one before",
        ((_ADAPTED, f'        weight = weight.roll(1, 0) if ".experts." in name else weight\n{_ADAPTED}'),),
        is_in_weights=True,
        also=_layers("model.layers.{}.mlp.experts"),
        also_kinds=("permutation",),
    ),
    Mistake(
        "up_before_gate",
        "mixture",
        "model.layers.0.mlp.experts",
        "permutation",
        "the two halves of the experts' first matrix change places: up is taken for gate",
        (
            (
                _ADAPTED,
                '        if name.endswith(".inward"):\n'
                "            weight = torch.cat(weight.chunk(2, 1)[::-1], 1)\n" + _ADAPTED,
            ),
        ),
        is_in_weights=True,
        also=_layers("model.layers.{}.mlp.experts"),
        also_kinds=("activation", "order"),
    ),
    Mistake(
        "head_in_eight_bits",
        "mixture",
        "lm_head",
        "quantisation",
        "the head goes through float8 as the other matrices of a quantised checkpoint would",
        (
            (
                _ADAPTED,
                '        if name == "predict.weight":\n'
                "            weight = weight.to(torch.float8_e4m3fn).to(weight.dtype)\n" + _ADAPTED,
            ),
        ),
        is_in_weights=True,
        also_kinds=("precision",),
    ),
)

MISTAKES: Final[Mapping[str, Mistake]] = {mistake.name: mistake for mistake in (*_ENCODER, *_MIXTURE)}
