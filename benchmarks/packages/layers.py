"""MoE layers of packages on PyPI, as their users make them.

Where a package imports what its MoE does not need, an empty module stands in during the import. Noise in routers and
dropout in experts are switched off by the package's own options, where it has any.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from itertools import product
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH, HIDDEN, EXPERTS, TOP = 32, 48, 8, 2
SEQUENCES = 2


class Layer(nn.Module):
    """A package's MoE layer that takes hidden [B, T, d] and returns the same and an auxiliary loss.

    The layer is given ``shape`` and ``dtype`` if it wants others. ``aux`` gets the loss from it and what it returned;
    without, it is the second result, if there is one.
    """

    def __init__(self, moe: nn.Module, shape: Any = None, dtype: Any = None, aux: Any = None) -> None:
        super().__init__()
        self.moe, self.shape, self.dtype, self.aux = moe, shape, dtype, aux

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        rows = hidden if self.shape is None else hidden.reshape(self.shape)
        result = self.moe(rows if self.dtype is None else rows.to(self.dtype))
        out, aux = result[:2] if isinstance(result, tuple) else (result, hidden.new_zeros(()))
        if self.aux is not None:
            aux = self.aux(self.moe, result)
        return out.reshape(hidden.shape).to(hidden.dtype), aux


class _StandIn(ModuleType):
    """A module that is not installed, of which every name is a class."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> type:
        # Python itself asks modules for __file__ and the like, and may do without.
        if name.startswith("__"):
            raise AttributeError(name)
        return object


def _load(name: str, *missing: str, alone: bool = False) -> Any:
    """Imports a module while others stand in for missing ones; alone, without the packages around it.

    They are taken out again: nobody else shall find them installed.
    """
    stand_ins = {one: _StandIn(one) for one in missing if one not in sys.modules}
    sys.modules.update(stand_ins)
    try:
        return _load_file(name) if alone else importlib.import_module(name)
    finally:
        for one in stand_ins:
            del sys.modules[one]


def _load_file(name: str) -> ModuleType:
    if name not in sys.modules:
        package, *path = name.split(".")
        found = importlib.util.find_spec(package)
        assert found is not None and found.submodule_search_locations is not None, name
        file = "/".join((found.submodule_search_locations[0], *path)) + ".py"
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None, file
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _new(path: str, *arguments: Any, **options: Any) -> Any:
    module, name = path.rsplit(".", 1)
    return getattr(_load(module), name)(*arguments, **options)


def _filled(module: nn.Module) -> nn.Module:
    """The module with small normals in every parameter, for those that a package leaves uninitialised or equal."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.2)
    return module


def _without_dropout(module: nn.Module) -> nn.Module:
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return module


def _alone() -> Any:
    """A process group of this process only, for packages that exchange tokens themselves and need one."""
    if not dist.is_initialized():
        # The ranks' own, where there are several: hecate.compile takes the one that it finds.
        alone = {} if "WORLD_SIZE" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)
        dist.init_process_group("gloo", **alone)
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))


def _torchtitan(gpt_oss: bool = False) -> nn.Module:
    """Experts that compute in bfloat16 whatever their parameters are; those of GPT-OSS return it, too."""
    modules = ("moe", "linear", "feed_forward", "token_dispatcher")
    moe, linear, feed_forward, dispatcher = (_load(f"torchtitan.models.common.{module}") for module in modules)
    kind, experts, shared = moe.MoE, moe.GroupedExperts, None
    lines = ((WIDTH, EXPERTS), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    gate, into, back = (linear.Linear.Config(in_features=i, out_features=o) for i, o in lines)
    if gpt_oss:
        package = _load("torchtitan.models.gpt_oss.moe", alone=True)
        kind, experts = package.GptOssMoE, package.GptOssGroupedExperts
    else:
        shared = feed_forward.FeedForward.Config(w1=into, w2=back, w3=into)
    routed = moe.RoutedExperts.Config(
        inner_experts=experts.Config(dim=WIDTH, hidden_dim=HIDDEN, num_experts=EXPERTS),
        token_dispatcher=dispatcher.LocalTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOP),
    )
    router = moe.TokenChoiceTopKRouter.Config(num_experts=EXPERTS, gate=gate, top_k=TOP, route_norm=True)
    layer = kind.Config(num_experts=EXPERTS, routed_experts=routed, router=router, shared_experts=shared).build()
    if gpt_oss:
        layer.router.bfloat16()
    return Layer(_filled(layer), dtype=torch.bfloat16 if gpt_oss else None)


def _litgpt(**options: Any) -> nn.Module:
    sizes = dict(n_layer=1, n_head=4, n_embd=WIDTH, intermediate_size=HIDDEN, moe_intermediate_size=HIDDEN)
    experts = dict(mlp_class_name="LLaMAMoE", n_expert=EXPERTS, n_expert_per_token=TOP, bias=False)
    config = _new("litgpt.config.Config", **sizes, **experts, **options)
    return Layer(_filled(_new("litgpt.model.LLaMAMoE", config)))


def _mistral() -> nn.Module:
    xformers = ("xformers", "xformers.ops", "xformers.ops.fmha", "xformers.ops.fmha.attn_bias")
    moe, layers = _load("mistral_inference.moe"), _load("mistral_inference.transformer_layers", *xformers)
    experts = [layers.FeedForward(WIDTH, HIDDEN) for _ in range(EXPERTS)]
    arguments = moe.MoeArgs(num_experts=EXPERTS, num_experts_per_tok=TOP)
    return Layer(moe.MoeLayer(experts, nn.Linear(WIDTH, EXPERTS, bias=False), arguments), _ROWS)


def _pytorch_mixtures(kind: str) -> nn.Module:
    experts = dict(hidden_dim=WIDTH, intermediate_dim=HIDDEN, num_experts=EXPERTS, expert_fn="ff", expert_act="silu")
    routing = dict(router_fn=None, capacity_factor=2.0, topk=TOP, dtype=torch.float32)
    return Layer(_new(f"pytorch_mixtures.{kind}", _new("pytorch_mixtures.MoEConfig", **experts, **routing)))


def _deepspeed(k: int, drop: bool = True) -> nn.Module:
    options = dict(k=k, drop_tokens=drop, use_rts=False, top2_2nd_expert_sampling=False)
    # Its experts are copies of one, unless they are filled.
    return Layer(_filled(_new("deepspeed.moe.layer.MoE", WIDTH, _mlp(), EXPERTS, **options)))


def _fairscale() -> nn.Module:
    package = _load("fairscale.nn.moe")
    # Top2Gate looks its noise up here; it has no option against it.
    package.top2gate.gumbel_map[torch.device("cpu")] = torch.zeros
    experts = nn.ModuleList(_mlp() for _ in range(EXPERTS))
    layer = package.MOELayer(package.Top2Gate(WIDTH, EXPERTS), experts, group=_alone())
    return Layer(layer, (EXPERTS, -1, WIDTH), aux=lambda moe, _: moe.l_aux)


_HISTOGRAM = torch.histc


def _histogram(values: Tensor, *arguments: Any, **options: Any) -> Tensor:
    return _HISTOGRAM(values.float(), *arguments, **options)


def _torchscale(gate: str, **options: Any) -> nn.Module:
    # For its log it counts integers, which torch does on GPUs only.
    vars(torch)["histc"] = _histogram
    groups = _load("torchscale.component.xmoe.global_groups")
    # It keeps its groups here, and would make them of all ranks and split the experts over them.
    own = [_alone()], [[dist.get_rank()]]
    groups.get_moe_group._moe_groups, groups.get_moe_group._moe_group_idx = own
    groups.get_all2all_group._all2all_groups, groups.get_all2all_group._all2all_group_idx = own
    expert = partial(_new, "torchscale.component.feedforward_network.FeedForwardNetwork", WIDTH, HIDDEN)
    experts = nn.ModuleList(expert("gelu", 0.0, 0.0, 1e-5) for _ in range(EXPERTS))
    router = _new(f"torchscale.component.xmoe.routing.{gate}", WIDTH, EXPERTS, **options)
    # With a batch size it does not ask other ranks for theirs.
    arguments = Namespace(moe_expert_count=EXPERTS, batch_size=SEQUENCES, batch_size_valid=SEQUENCES)
    return Layer(_new("torchscale.component.xmoe.moe_layer.MOELayer", router, experts, arguments))


def _st_moe() -> nn.Module:
    # A second expert is taken with a probability of its weight over the threshold, so with one of 1 here.
    options = dict(threshold_train=1e-9, threshold_eval=1e-9, expert_hidden_mult=2, is_distributed=False)
    return Layer(_new("st_moe_pytorch.SparseMoEBlock", _new("st_moe_pytorch.MoE", WIDTH, EXPERTS, **options)))


def _nemo(experts: str = "torch", aux: float = 0.0, bias: float = 0.0) -> nn.Module:
    layers = _load("nemo_automodel.components.moe.layers")
    # torch's grouped products are traced in bfloat16 alone.
    dtype = torch.bfloat16 if experts == "torch_mm" else torch.float32
    counts = dict(n_routed_experts=EXPERTS, n_shared_experts=1, n_activated_experts=TOP)
    sizes = dict(dim=WIDTH, inter_dim=HIDDEN, moe_inter_dim=HIDDEN, expert_bias=bias > 0, dtype=dtype)
    groups = dict(n_expert_groups=1, n_limited_groups=1, score_func="softmax", route_scale=1.0, norm_topk_prob=True)
    training = dict(train_gate=True, gate_bias_update_factor=bias, aux_loss_coeff=aux)
    config = layers.MoEConfig(**counts, **sizes, **groups, **training)
    backend = layers.BackendConfig(attn="sdpa", linear="torch", experts=experts, dispatcher="torch")
    return Layer(_filled(layers.MoE(config, backend)).to(dtype), dtype=dtype)


def _olmo3() -> nn.Module:
    names = ("configuration_olmo3moe", "modeling_olmo3moe")
    config, model = (_load(f"olmo_core.nn.moe.v2.hf.{name}", alone=True) for name in names)
    attention = dict(attention_hidden_size=WIDTH, num_attention_heads=4, num_hidden_layers=1)
    experts = dict(n_routed_experts=EXPERTS, num_experts_per_tok=TOP, moe_intermediate_size=HIDDEN)
    sizes = dict(hidden_size=WIDTH, shared_expert_intermediate_size=HIDDEN)
    return Layer(model.Olmo3MoeSparseMLP(config.Olmo3MoeConfig(**sizes, **experts, **attention)))


class _Permuted(nn.Module):
    """A router and permutation around OLMo-core's experts; its own are Triton."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        make = getattr(_load("olmo_core.nn.moe.mlp", "cached_path", alone=True), kind)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = make(d_model=WIDTH, hidden_size=HIDDEN, num_experts=EXPERTS)
        self.drops = kind == "MoEMLP"

    def forward(self, rows: Tensor) -> Tensor:
        scores = self.router(rows).softmax(-1)
        if self.drops:
            # Every expert takes as many tokens as it has room for.
            weights, token = scores.t().topk(TOP * len(rows) // EXPERTS)
            out = self.experts(rows[token]).flatten(0, 1)
        else:
            weights, expert = scores.topk(TOP)
            order = expert.flatten().argsort(stable=True)
            weights, token = weights.flatten()[order], order // TOP
            out = self.experts(rows[token], expert.flatten().bincount(minlength=EXPERTS))
        return torch.zeros_like(rows).index_add(0, token.flatten(), out * weights.reshape(-1, 1))


class _Image(nn.Module):
    """A vision layer that is given the sequence as an image of three rows."""

    def __init__(self, kernels: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.moe: Any = _new("esmoe.module.ESMoE", 4, TOP, WIDTH, expert_kernel_sizes=kernels)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        out = self.moe(hidden.transpose(1, 2).unflatten(2, (3, -1)))
        return out.flatten(2).transpose(1, 2), self.moe.aux_loss


def _mixlora() -> nn.Module:
    llama, package = _load("transformers.models.llama.modeling_llama"), _load("mixlora.model")
    mlp = llama.LlamaMLP(llama.LlamaConfig(hidden_size=WIDTH, intermediate_size=HIDDEN))
    weights = {"mixlora.layers.0.mlp.moe_gate.weight": torch.randn(EXPERTS, WIDTH)}
    targets = ("gate_proj", "up_proj", "down_proj")
    for target, expert in product(targets, range(EXPERTS)):
        out, into = getattr(mlp, target).weight.shape
        key = f"mixlora.layers.0.mlp.{target}.experts.{expert}"
        weights |= {f"{key}.lora_{k}.weight": 0.2 * torch.randn(s) for k, s in (("A", (4, into)), ("B", (out, 4)))}
    # It asks for more dropout than none.
    lora = dict(lora_r_=4, lora_alpha_=8, lora_dropout_=1e-12, target_modules_=dict.fromkeys(targets, True))
    experts = dict(num_experts_=EXPERTS, top_k_=TOP, act_fn_="silu", jitter_noise_=0.0, dtype_=torch.float32)
    config = package.MixLoraConfig(adapter_name_="default", lora_init_="original", **lora, **experts)
    layers = [Namespace(self_attn=None, mlp=mlp)]
    model = Namespace(config=Namespace(model_type="llama"), model=Namespace(layers=layers))
    package.inject_adapter_in_model(model, config, weights)
    return Layer(mlp)


def _latent_moe(implementation: str) -> nn.Module:
    # Half the width and twice the experts: eight, of which a token takes two.
    sizes = dict(d=WIDTH, m=24, n_experts=4, top_k=1, alpha=2, n_shared=1, device="cpu", impl=implementation)
    layer = _new("latent_moe.LatentMoE", _new("latent_moe.LatentMoEConfig", **sizes))
    return Layer(layer, aux=lambda moe, _: moe.aux_loss + moe.z_loss)


def _mh_moe() -> nn.Module:
    layer = _without_dropout(_new("mh_moe.main.SparseMoE", WIDTH, EXPERTS, TOP))
    # Its other router, without noise. Both print in every forward.
    layer.router = _new("mh_moe.main.TopkRouter", WIDTH, EXPERTS, TOP)
    return Layer(layer)


def _cluster_moe() -> nn.Module:
    sizes = dict(d_model=WIDTH, d_ff=HIDDEN, num_clusters=2, experts_per_cluster=4)
    layer = _new("cluster_moe.main.ClusterOfExpertsLayer", _new("cluster_moe.main.CoEConfig", **sizes))
    for cluster in layer.clusters:
        # Experts count for less the more of their room all batches so far took; one process has seen every rank's.
        cluster.expert_capacity.fill_(1e12)
    # Its other losses are of such counts, and without gradient.
    names = ("router_z_loss", "routing_entropy")
    layer = _without_dropout(layer)
    return Layer(layer, aux=lambda _, result: sum(result[1]["aux_losses"][name] for name in names))


_ROWS = (-1, WIDTH)
_DEEPSEEK = dict(
    n_expert_groups=4, n_topk_groups=2, n_topk_scores_per_group=2, n_shared_expert=1, norm_topk_prob=True
)
_SPARROW = dict(hidden_dim=WIDTH, num_experts=EXPERTS, expert_hidden_size=HIDDEN, expert_embedding_dim=8)
_MIXTURE = dict(hidden_dim=HIDDEN, second_policy_train="all", second_policy_eval="all")


def _megatron() -> nn.Module:
    """Megatron-core's layer as it is without TransformerEngine, one expert behind the other; on a CPU for once."""
    parts = ["moe.moe_layer", "moe.experts", "moe.router", "mlp", "spec_utils", "transformer_config"]
    moe, experts, router, mlp, specs, config = (_load(f"megatron.core.transformer.{part}") for part in parts)
    linears = _load("megatron.core.tensor_parallel.layers")
    groups = _load("megatron.core.process_groups_config").ProcessGroupCollection()
    alone = _alone()
    for name in ["tp", "cp", "ep", "expt_tp", "expt_dp", "tp_cp", "tp_ep", "tp_dp_cp", "dp"]:
        setattr(groups, name, alone)
    # Megatron's own gating moves its weights to a GPU, whether there is one or not.
    gating = {"gating": lambda self, input: nn.functional.linear(input, self.weight)}
    on_any_device = type("TopKRouter", (router.TopKRouter,), gating)
    submodules = mlp.MLPSubmodules(linear_fc1=linears.ColumnParallelLinear, linear_fc2=linears.RowParallelLinear)
    options = config.TransformerConfig(
        num_layers=1,
        num_attention_heads=2,
        hidden_size=WIDTH,
        ffn_hidden_size=HIDDEN,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP,
        moe_token_dispatcher_type="allgather",
        moe_router_load_balancing_type="none",
        use_cpu_initialization=True,
        add_bias_linear=False,
    )
    spec = moe.MoESubmodules(
        router=on_any_device, experts=specs.ModuleSpec(experts.SequentialMLP, submodules=submodules)
    )
    layer = _filled(moe.MoELayer(options, spec, layer_number=0, pg_collection=groups))
    return Layer(layer, aux=lambda moe, result: result[0].new_zeros(()))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "torchtitan": _torchtitan,
    "torchtitan gpt-oss": partial(_torchtitan, gpt_oss=True),
    "litgpt": _litgpt,
    "litgpt deepseek": partial(_litgpt, **_DEEPSEEK),
    "mistral-inference": _mistral,
    "pytorch-mixtures": partial(_pytorch_mixtures, "TopkMoE"),
    "pytorch-mixtures expert choice": partial(_pytorch_mixtures, "ExpertChoiceMoE"),
    "deepspeed top-1": partial(_deepspeed, 1),
    "deepspeed top-2": partial(_deepspeed, 2),
    "deepspeed top-2 no drop": partial(_deepspeed, 2, drop=False),
    "deepspeed top-3": partial(_deepspeed, 3),
    "fairscale": _fairscale,
    "torchscale top-1": partial(_torchscale, "Top1Gate", use_xmoe=True),
    "torchscale top-2": partial(_torchscale, "Top2Gate", second_expert_policy="all"),
    "soft-moe-pytorch": lambda: Layer(
        _new("soft_moe_pytorch.SoftMoE", WIDTH, num_slots=2, num_experts=EXPERTS, expert_mult=1, is_distributed=False)
    ),
    "st-moe-pytorch": _st_moe,
    "nemo-automodel": _nemo,
    "nemo-automodel aux": partial(_nemo, aux=0.01, bias=0.001),
    "nemo-automodel torch_mm": partial(_nemo, "torch_mm"),
    "olmo-core olmo3": _olmo3,
    "olmo-core": lambda: Layer(_Permuted("MoEMLP"), _ROWS),
    "olmo-core dropless": lambda: Layer(_Permuted("DroplessMoEMLP"), _ROWS),
    "sparrow-mlp": lambda: Layer(
        _new("sparrow.layers.MoELayer", _new("sparrow.config.SparrowConfig", **_SPARROW)), _ROWS
    ),
    "ibm-fms": lambda: Layer(_filled(_new("fms.modules.feedforward.MOEFeedForward", EXPERTS, TOP, WIDTH, HIDDEN))),
    "mixture-of-experts": lambda: Layer(_new("mixture_of_experts.MoE", WIDTH, EXPERTS, **_MIXTURE)),
    "mixture-of-experts hierarchical": lambda: Layer(
        _new("mixture_of_experts.HeirarchicalMoE", WIDTH, (4, 4), **_MIXTURE)
    ),
    "esmoe": _Image,
    "esmoe equal kernels": partial(_Image, (3, 3, 3, 3)),
    "mixlora": _mixlora,
    "latent-moe": partial(_latent_moe, "grouped"),
    "latent-moe loop": partial(_latent_moe, "loop"),
    "mh-moe": _mh_moe,
    "cluster-moe": _cluster_moe,
    "megatron-core": _megatron,
}
