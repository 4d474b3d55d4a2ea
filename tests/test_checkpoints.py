"""Layers of checkpoints: tiny folders with published names, read back by a second reading of the format and run."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import megamoe
from megamoe import cli
from megamoe.checkpoints import KINDS, Checkpoint, CheckpointError, CheckpointLayer, read_layer, write_tiny_checkpoint
from megamoe.oracle.metrics import LIMITS, Limits, assert_bytes_equal
from megamoe.oracle.reference import dequantize_weight
from megamoe.oracle.reference.quantizers import BlockFormat
from megamoe.recipe import traits

safetensors_torch = pytest.importorskip("safetensors.torch", reason="needs the package safetensors")

LAYER, H, I, E = 3, 256, 128, 4
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(kind)
    write_tiny_checkpoint(path, kind, layer=LAYER, hidden=H, intermediate=I, num_experts=E)
    return path


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in folder.glob("*.safetensors") for n, t in safetensors_torch.load_file(file).items()}


def _value(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """fp32 [n, k] from a checkpoint's own matrix and scales, told apart by their shapes."""
    if weight.dtype == torch.float8_e4m3fn:
        return weight.float() * scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
    packed = weight.view(torch.uint8).reshape(len(weight), -1).int()
    values = E2M1[torch.stack([packed % 16, packed // 16], -1).flatten(1)]
    return values * torch.exp2(scale.view(torch.uint8).float() - 127).repeat_interleave(32, 1)


def _expected(folder: Path, kind: str, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(w13 [2I, H] as its rows lie in the layer, w2 [H, I])."""
    found = _tensors(folder)
    if kind == "gpt_oss":
        name = f"model.layers.{LAYER}.mlp.experts."
        pairs = (f"{name}gate_up_proj", f"{name}down_proj")
        w13, w2 = (_value(found[f"{pair}_blocks"][expert], found[f"{pair}_scales"][expert]) for pair in pairs)
        return w13, w2
    name = f"layers.{LAYER}.ffn.experts.{expert}."
    w1, w2, w3 = (_value(found[f"{name}w{i}.weight"], found[f"{name}w{i}.scale"]) for i in (1, 2, 3))
    return torch.cat([w1, w3]), w2


def _read(folder: Path) -> CheckpointLayer:
    return read_layer(folder, LAYER)


def test_weights_are_the_checkpoints_under_every_recipe(folder: Path, kind: str) -> None:
    layer = _read(folder)
    assert (layer.num_experts, layer.hidden, layer.intermediate, layer.top_k) == (E, H, I, 2)
    for recipe in layer.recipes:
        arguments = layer.weight_arguments(recipe)
        w13, w2 = (dequantize_weight(arguments[n], arguments[f"{n}_scale"], recipe) for n in ("w13", "w2"))
        for expert in range(E):
            expected = _expected(folder, kind, expert)
            assert torch.equal(w13[expert], expected[0])
            assert torch.equal(w2[expert], expected[1])
    if kind == "gpt_oss":
        assert arguments["w13_layout"] == "interleaved"
        bias = _tensors(folder)[f"model.layers.{LAYER}.mlp.experts.gate_up_proj_bias"]
        assert_bytes_equal(arguments["w13_bias"], bias, "bias")


def test_options_are_the_configs(folder: Path, kind: str) -> None:
    options = _read(folder).options
    if kind == "gpt_oss":
        assert options == dict(
            activation="swigluoai", activation_alpha=1.702, activation_beta=1.0, activation_clamp=7.0
        )
    else:
        assert options == dict(activation="swiglu", activation_clamp=10.0, routed_scaling_factor=1.5)


@pytest.mark.parametrize("count", [1, 2])
def test_shared_experts_in_each_recipes_form(count: int, tmp_path: Path) -> None:
    write_tiny_checkpoint(
        tmp_path, "deepseek_v4_mxfp4", layer=LAYER, hidden=H, intermediate=I, num_shared_experts=count
    )
    found, layer = _tensors(tmp_path), _read(tmp_path)
    name = f"layers.{LAYER}.ffn.shared_experts."
    w1, w2, w3 = (_value(found[f"{name}w{i}.weight"], found[f"{name}w{i}.scale"]) for i in (1, 2, 3))
    shared_formats = {"ue8m0": BlockFormat("e4m3", "ue8m0", 1, 32), "fp32": BlockFormat("e4m3", "fp32", 128, 128)}
    for recipe in layer.recipes:
        given = layer.weight_arguments(recipe)
        assert megamoe.prepare_weights(**given).num_shared_experts == count
        pairs = [(given[f"shared_{n}"], given[f"shared_{n}_scale"]) for n in ("w13", "w2")]
        if recipe.numerics != "trtllm_gen":
            fmt = shared_formats[str(traits(recipe).act_scale_format)]
            assert torch.equal(dequantize_weight(*pairs[0], fmt), torch.cat([w1, w3])), "without loss"
            assert torch.equal(dequantize_weight(*pairs[1], fmt), w2)
            continue
        w13_slots, w2_slots = (dequantize_weight(*pair, recipe) for pair in pairs)
        for slot in range(count):
            rows = slice(slot * I, (slot + 1) * I)
            for ours, theirs in ((w13_slots[slot], torch.cat([w1[rows], w3[rows]])), (w2_slots[slot], w2[:, rows])):
                assert 0.05 < (ours - theirs).norm() / theirs.norm() < 0.15, "requantized, each slot's own rows"


def _put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sets TRITON_INTERPRET where there is no GPU; a patch puts it back."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def test_check_compares_every_recipe(folder: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _put_back(monkeypatch)
    path = tmp_path / "out.json"
    arguments = ["check", "--checkpoint", str(folder), "--layer", str(LAYER), "--tokens", "3", "--json", str(path)]
    result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    assert (report["layer"], report["tokens"], report["checkpoint"]) == (LAYER, 3, str(folder))
    ran = [row for row in report["rows"] if row["backend"] == "triton"]
    assert [row["recipe"] for row in ran] == [str(recipe) for recipe in _read(folder).recipes]
    for row in ran:
        assert row["problem"] is None
        assert row["errors"]["fitted_scale"] == pytest.approx(1, abs=2e-3)
    if not torch.cuda.is_available():
        assert "deep_gemm did not run" in result.output
        assert f"{len(ran)} of {len(ran)} comparisons hold; {2 * len(ran)} could not run" in result.output


def test_check_fails_beyond_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _put_back(monkeypatch)
    write_tiny_checkpoint(tmp_path, "gpt_oss")
    recipe = _read(tmp_path).recipes[0]
    impossible = Limits(rel_rms=-1.0, worst_row=1.0, scale_error=1.0, calc_diff=1.0, reason="to fail")
    monkeypatch.setitem(LIMITS, recipe, impossible)
    arguments = ["check", "--checkpoint", str(tmp_path), "--layer", "3", "--tokens", "1", "--mma-type", "bf16xfp4"]
    result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == 1
    assert f"FAILED {recipe} triton: rel_rms" in result.output


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--layer", "3"], 2, "--layer and --tokens are of a --checkpoint"),
        (["--checkpoint", "{folder}"], 2, "--checkpoint needs --layer"),
        (["--checkpoint", "{folder}", "--layer", "3", "--download"], 2, "takes no --case, --list, --download"),
        (["--checkpoint", "{folder}", "--layer", "9"], 1, "layer 9 of "),
        (["--checkpoint", "{folder}", "--layer", "3", "--mma-type", "fp8xfp8"], 2, "it has bf16xfp4, fp8xfp4"),
    ],
)
def test_check_refuses(
    arguments: list[str], code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _put_back(monkeypatch)
    write_tiny_checkpoint(tmp_path, "gpt_oss")
    result = CliRunner().invoke(cli.main, ["check", *(a.format(folder=tmp_path) for a in arguments)])
    assert result.exit_code == code, result.output
    assert words in result.output.replace("\n", " ")


def _rewrite(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    """Change the tensors of a folder, which become one file without an index."""

    def apply(folder: Path) -> None:
        tensors = {name: tensor.clone() for name, tensor in _tensors(folder).items()}
        for file in (*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"):
            file.unlink(missing_ok=True)
        change(tensors)
        safetensors_torch.save_file(tensors, folder / "all.safetensors")

    return apply


def _replace(name: str, value: torch.Tensor | None) -> Callable[[Path], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        old = tensors.pop(name)
        if value is not None:
            tensors[name] = value if value.numel() else old[:-1].contiguous()

    return _rewrite(change)


def _strange_index(*names: str) -> Callable[[Path], None]:
    """An index that names tensors which their file has not."""

    def apply(folder: Path) -> None:
        for name in names:
            _replace(name, None)(folder)
        files = dict.fromkeys([*_tensors(folder), *names], "all.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))

    return apply


def _config(**fields: object) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "config.json"
        config = {**json.loads(path.read_text()), **fields}
        path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))

    return apply


SHORTER = torch.empty(0)
V4 = f"layers.{LAYER}.ffn."
OSS = f"model.layers.{LAYER}.mlp.experts."


@pytest.mark.parametrize(
    ("kind", "damage", "words"),
    [
        ("deepseek_v4_fp8", _replace(f"{V4}experts.1.w2.scale", None), "has no .*experts.1.w2.scale; expected F8_E8M0"),
        ("deepseek_v4_fp8", _replace(f"{V4}experts.2.w3.weight", SHORTER), r"is F8_E4M3 \[127, 256\]; expected F8_E4M3 "
         r"\[n, k\] = \[128, 256\]"),
        ("deepseek_v4_mxfp4", _replace(f"{V4}experts.0.w1.weight", torch.ones(I, H)), r"w1.weight is F32 \[128, 256\]; "
         r"expected F8_E4M3 \[I, H\] or I8 \[I, H/2\]"),
        ("deepseek_v4_mxfp4", _replace(f"{V4}shared_experts.w1.scale", SHORTER), r"shared_experts.w1.scale is F8_E8M0"),
        ("deepseek_v4_mxfp4", _config(n_routed_experts=6), "has 4 experts, 0, 1, 2, 3; expected 0 … 5"),
        ("deepseek_v4_mxfp4", _config(num_experts_per_tok=None), "config.json has none of num_experts_per_tok"),
        ("gpt_oss", _replace(f"{OSS}gate_up_proj_blocks", torch.ones(4, 256, 8, 8, dtype=torch.uint8)),
         r"gate_up_proj_blocks is U8 \[4, 256, 8, 8\]; expected U8 \[E, 2I, H/32, 16\]"),
        ("gpt_oss", _replace(f"{OSS}down_proj_bias", None), r"has no .*down_proj_bias; expected BF16 or F32 \[E, H\]"),
        ("gpt_oss", _rewrite(lambda tensors: tensors.update({f"a.{name}": tensors.pop(name) for name in [*tensors]})),
         r"no MoE layer of a known naming: expected \[model.\]layers.N.ffn.* or model.layers.N.mlp.*; found a.model"),
        ("gpt_oss", lambda folder: (folder / "model.safetensors").unlink(), "safetensors files; it has config.json"),
        ("gpt_oss", lambda folder: (folder / "model.safetensors").write_bytes(b"none"), "cannot be read"),
        ("gpt_oss", lambda folder: (folder / "model.safetensors").write_bytes(LFS), "read: a Git LFS pointer, "),
        ("gpt_oss", lambda folder: (folder / "config.json").unlink(), "config.json cannot be read: no such file"),
        ("gpt_oss", lambda folder: (folder / "config.json").write_text("{"), "config.json is not JSON"),
        ("deepseek_v4_fp8", lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(),
         "00002.safetensors is not there, though the index names it"),
        ("deepseek_v4_fp8", _strange_index(f"{V4}experts.1.w2.weight"),
         r"all.safetensors has no readable layers.3.ffn.experts.1.w2.weight, expected there: .+"),
    ],
)  # fmt: skip
def test_other_contents_are_named(kind: str, damage: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, kind, layer=LAYER, hidden=H, intermediate=I, num_experts=E)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        _read(tmp_path)


def test_layers_are_counted_as_the_names_count(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="layer 2 of .* has no experts; MoE layers there: 3$"):
        read_layer(folder, 2)
    with pytest.raises(ValueError, match="^layer is -1"):
        read_layer(folder, -1)
    with pytest.raises(CheckpointError, match="is no folder here; expected a local one .* not looked up"):
        read_layer("deepseek-ai/DeepSeek-V4-Flash", LAYER)


def test_a_prefix_changes_nothing(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "deepseek_v4_fp8", layer=LAYER)
    expected = _read(tmp_path)
    _rewrite(lambda tensors: tensors.update({f"model.{name}": tensors.pop(name) for name in [*tensors]}))(tmp_path)
    layer = _read(tmp_path)
    assert_bytes_equal(layer.weights.w13, expected.weights.w13, "w13")
    assert layer.shared is not None


def test_only_the_layers_shard_is_opened(tmp_path: Path) -> None:
    """A folder with the shard that has the experts serves them, where there are no shared ones."""
    write_tiny_checkpoint(tmp_path, "deepseek_v4_fp8", layer=LAYER, num_shared_experts=0)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert _read(tmp_path).shared is None


def test_unequal_block_scales_are_refused_where_they_would_be_lossy(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "deepseek_v4_mxfp4", layer=LAYER)
    _replace(f"{V4}shared_experts.w2.scale", torch.full((2, 1), 0.003))(tmp_path)
    layer = _read(tmp_path)
    with pytest.raises(ValueError, match=r"^fp8_scale has 0.003 at \[0, 0\]"):
        layer.weight_arguments(layer.recipes[0])
    assert layer.weight_arguments(layer.recipes[1])["shared_w2_scale"].flatten().tolist() == pytest.approx([0.003] * 2)


def test_without_the_library_its_name_is_told(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match="needs the package safetensors"):
        _read(folder)


def test_unknown_kinds(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="^kind is 'llama'; allowed: 'deepseek_v4_fp8'"):
        write_tiny_checkpoint(tmp_path, "llama")
    assert set(KINDS) == {"deepseek_v4_fp8", "deepseek_v4_mxfp4", "gpt_oss"}


def test_a_tensor_that_its_file_has_not_is_named(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "gpt_oss", layer=LAYER)
    name = f"{OSS}gate_up_proj_blocks"
    _strange_index(name)(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    for read in (checkpoint.describe, checkpoint.tensor):
        with pytest.raises(CheckpointError, match=f"all.safetensors has no readable {name}, expected there"):
            read(name)
