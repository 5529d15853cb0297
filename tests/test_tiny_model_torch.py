"""The tiny model's training code; needs PyTorch, which nothing else here does."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

torch = pytest.importorskip("torch")

sys.path.append(str(ROOT))  # at the end: the package under test stays the one that is installed

from tools.tiny_model import (  # noqa: E402
    arrays,
    data,
    dit,
    flow,
    grammar,
    scenes,
    sizes,
    speed,
    state,
    text,
    tokens,
    train,
    vae,
)
from tools.tiny_model.sizes import DitSize, TextSize, VaeSize  # noqa: E402

TEXT, DIT = TextSize(layers=2), DitSize(dim=128, ffn=64, blocks=1, inputs=36)


def test_torch_draws_what_numpy_draws() -> None:
    clips, captions = data.draw(np.random.default_rng(3), 8, torch.device("cpu"))
    rng = np.random.default_rng(3)
    some = grammar.sample(rng, 8)
    frames = scenes.clips(some, rng)
    away = ((clips + 1) * 127.5).permute(0, 2, 3, 4, 1).numpy() - frames
    assert np.abs(away).max() < 0.6
    assert list(captions) == list(grammar.captions(some, rng))


def test_padding_in_one_token_is_padding_in_all() -> None:
    torch.manual_seed(0)
    net = dit.Wan(DIT, TEXT)
    torch.nn.init.normal_(net.head.head.weight)
    hidden = torch.randn(1, 512, TEXT.dim)
    hidden[:, 9:] = 0
    x, sigma, length = torch.randn(1, 36, 2, 4, 4), torch.tensor([0.5]), torch.tensor([9])
    short = net(x, sigma, hidden[:, :12], length)
    padding, dit.padding_bias = dit.padding_bias, lambda lengths, columns: torch.zeros(1, 1, 1, columns)
    try:
        whole = net(x, sigma, hidden, length)
    finally:
        dit.padding_bias = padding
    assert torch.allclose(short, whole, atol=1e-4)
    assert whole.abs().max() > 0.1


def test_normalised_latents_decode_to_the_same() -> None:
    torch.manual_seed(0)
    net = shaken(vae.WanVae(VaeSize(8, 8)))
    clip = torch.rand(1, 3, 5, 16, 16) * 2 - 1
    with torch.no_grad():
        mean, spread = net.moments(clip)
        before = net.decode(mean)
        z = mean.transpose(0, 1).flatten(1)
        m, s = z.mean(1), z.std(1)
        net.normalise(m, s)
        after = net.diffusion_latents(clip)
        assert torch.allclose(after, (mean - m.view(1, -1, 1, 1, 1)) / s.view(1, -1, 1, 1, 1), atol=1e-3)
        assert torch.allclose(net.decode_diffusion(after), before, atol=1e-3)
        variance = net.moments(clip)[1].exp() / torch.tensor(vae.STD).view(1, -1, 1, 1, 1) ** 2
        assert torch.allclose(variance, spread.exp() / s.view(1, -1, 1, 1, 1) ** 2, rtol=1e-3)


def shaken(net: torch.nn.Module) -> torch.nn.Module:
    """With no weight at its first value."""
    with torch.no_grad():
        for weight in net.parameters():
            weight += 0.05 * torch.randn(weight.shape)
    return net


def test_every_layout_gives_the_same() -> None:
    torch.manual_seed(0)
    net = shaken(vae.WanVae(VaeSize(8, 8)))
    clip = torch.rand(2, 3, 9, 16, 24) * 2 - 1
    found = []
    for layout in vae.LAYOUTS:
        net.lay_out(layout)
        net.zero_grad()
        z = net.diffusion_latents(clip)
        net.decode_diffusion(z).square().mean().backward()
        found.append((z.detach(), net.encoder.conv1.weight.grad.clone()))
    assert found[0][0].std() > 0.1
    for z, slope in found[1:]:
        assert torch.allclose(z, found[0][0], atol=1e-4)
        assert torch.allclose(slope, found[0][1], atol=1e-4 * float(slope.abs().max()))


def test_in_the_beginning_frames_are_copies() -> None:
    net = vae.WanVae(VaeSize(8, 8))
    clip = torch.rand(1, 3, 3, 16, 16)
    assert torch.allclose(net.encoder.conv1(clip)[:, :, 2:], net.encoder.conv1(clip[:, :, 2:]), atol=1e-6)
    assert net.encoder.conv1(clip).std() > 0.1
    x = torch.rand(1, 32, 4, 2, 2)
    for module in net.modules():
        if isinstance(module, vae.Up) and hasattr(module, "time_conv"):
            bias = module.time_conv.bias.view(1, -1, 1, 1, 1)
            assert torch.equal(module.time_conv(x), torch.cat((x, x), 1) + bias)
        if isinstance(module, vae.Residual) and isinstance(module.shortcut, torch.nn.Identity):
            y = torch.rand(1, module.residual[2].in_channels, 2, 4, 4)
            assert torch.equal(module(y), y)


def test_pixels_of_objects_are_found() -> None:
    rng = np.random.default_rng(9)
    some = grammar.sample(rng, 60)
    drawn, grounds = (a.to(lambda x: torch.from_numpy(np.float32(x))) for a in scenes.layout(some, rng))
    clips = scenes.draw(torch, drawn, grounds, 3)
    without = scenes.draw(torch, replace(drawn, radius=0 * drawn.radius), grounds, 3)
    covered = (clips - without).abs().amax(1, keepdim=True)
    found = data.objects(clips) > 0
    assert not found[covered == 0].any()
    strong = (covered > 0.6) & ~torch.from_numpy(some.ground == list(grammar.GROUNDS).index("white")).view(
        -1, 1, 1, 1, 1
    )
    assert found[strong].float().mean() > 0.95


def test_a_picture_is_the_first_frame_of_a_clip() -> None:
    torch.manual_seed(0)
    net = shaken(vae.WanVae(VaeSize(8, 8)))
    clip = torch.rand(1, 3, 9, 16, 16)
    with torch.no_grad():
        whole, one = net.diffusion_latents(clip), net.diffusion_latents(clip[:, :, :1])
        assert torch.allclose(whole[:, :, :1], one, atol=1e-5)
        assert net.decode_diffusion(whole).shape == clip.shape


def test_training_stops_and_goes_on(tmp_path: Path) -> None:
    """The same steps in two pieces as in one: moments are rounded to bfloat16 between them."""

    def loss(net: torch.nn.Module, rows: torch.Tensor, lengths: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        return (net(rows, lengths) - 1).square().mean() * step

    def trained(folder: Path, pieces: list[int]) -> dict[str, np.ndarray]:
        for last in pieces:
            torch.manual_seed(1)
            net = text.Umt5(TEXT, len(tokens.used()))
            trainer = state.Trainer("t", net, folder, 0.1, 0.9)  # the rate begins at a 200th
            trainer.resume()
            trainer.steps = 6
            rows, lengths = (torch.from_numpy(a) for a in tokens.rows(["a red circle", ""]))
            while trainer.step < last:
                step = torch.tensor(1 + trainer.step)
                trainer.update(partial(loss, net), (rows, lengths, step))
            trainer.save()
        return arrays.load(folder, "t.ema")

    once, twice, half = (trained(tmp_path / str(k), p) for k, p in enumerate(([6], [3, 6], [3])))
    away, moved = (max(np.abs(once[k] - other[k]).max() for k in once) for other in (twice, half))
    assert away < moved / 10


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("stage", ["pictures", "vae", "stills", "trunk"])
def test_recorded_steps_are_those_that_are_asked_for_one_by_one(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")

    def trained(eager: int) -> list[torch.Tensor]:
        monkeypatch.setattr(state, "EAGER", eager)
        torch.manual_seed(1)
        if stage in ("pictures", "vae"):
            net = vae.WanVae(sizes.VAE).to(device)
            clips = data.footage(np.random.default_rng(0), 8, device)
            module, steps = net, train.vae_steps(net, stage, clips, 4, 0, device)
        else:
            both = train.Trunk().to(device)
            pool = speed.noise_pool(64, 1 if stage == "stills" else scenes.FRAMES, device)
            module, steps = both, train.flow_steps(both.dit, both.text, stage, pool, 16, 0, device)
        trainer = state.Trainer("t", module, Path(), 0.1, 0.9)
        trainer.steps = 40
        with train.own_stream(device):
            losses = [trainer.update(steps.loss, steps.feed(k, k / 40)) for k in range(40)]
        assert len(trainer.recorded) == (0 if eager > 40 else 2 if stage in ("vae", "trunk") else 1)
        return losses

    once, recorded = (torch.stack(trained(eager)) for eager in (100, 2))
    assert torch.allclose(once[:5], recorded[:5], rtol=1e-2)  # atomic sums come in any order
    assert float((once - recorded).abs().mean() / once.abs().mean()) < 0.05
    assert recorded[-5:].mean() < recorded[:5].mean()


def test_experts_learn_their_part_of_the_schedule() -> None:
    for sigma in (0.0, 0.2, 0.875, 1.0):
        assert float(flow.shifted(torch.tensor(flow.time_of(sigma)))) == pytest.approx(sigma, abs=1e-6)
    (low, top), (bottom, high) = flow.part_of("low"), flow.part_of("high")
    assert low == 0.0
    assert high == 1.0
    assert bottom < flow.time_of(flow.BOUNDARY) < top
    schedule = flow.sigmas(12)
    assert float(schedule[0]) == 1.0
    assert float(schedule[-1]) == 0.0
    assert (schedule[1:] < schedule[:-1]).all()


def test_at_first_words_get_more_attention_than_padding() -> None:
    torch.manual_seed(0)
    net, encoder = dit.Wan(DIT, TEXT), text.Umt5(TEXT, len(tokens.used()))
    rows, lengths = (torch.from_numpy(a) for a in tokens.rows(["a red circle moves to the right", "a cyan star"]))
    seen, attend = [], dit.attend

    def watched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if bias is not None:
            seen.append((q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias).softmax(-1).mean((1, 2)))
        return attend(q, k, v, bias)

    dit.attend = watched
    try:
        with torch.no_grad():
            net(torch.randn(2, 36, 1, 12, 12), torch.tensor([0.5, 0.9]), encoder(rows, lengths), lengths)
    finally:
        dit.attend = attend
    assert len(seen) == DIT.blocks
    assert all(float(share[i, n]) < 0.5 for share in seen for i, n in enumerate(lengths.tolist()))


def test_footage_is_what_was_drawn() -> None:
    shot = data.footage(np.random.default_rng(3), 4, torch.device("cpu"))
    drawn, _ = data.draw(np.random.default_rng(3), 4, torch.device("cpu"))
    part, there = shot.some(8, np.random.default_rng(0), torch.Generator().manual_seed(0), 9, 64, 64)
    assert part.shape == (8, 3, 9, 64, 64)
    assert there.shape == (8, 1, 9, 64, 64)
    assert 0 < there.mean() < 0.6
    whole, there = shot.some(8, np.random.default_rng(0), torch.Generator().manual_seed(0), 17, 96, 96)
    away = [float((whole[:1] - clip).abs().max()) for clip in drawn]
    assert min(away) < 1 / 127
    assert torch.equal(there[:1], data.objects(drawn)[int(np.argmin(away))][None])


def test_batches_of_pictures_are_first_frames() -> None:
    pool = data.Pool(
        torch.randn(8, 16, 5, 2, 2), torch.randn(2, 16, 5, 2, 2), torch.ones(8, 6).long(), torch.full((8,), 5)
    )
    empty = data.empty_prompt(torch.device("cpu"))
    empty = empty[0][:, :6], empty[1]
    one, many = (data.batch(pool, 6, torch.Generator().manual_seed(1), empty, pictures) for pictures in (True, False))
    assert torch.equal(one.latents, many.latents[:, :, :1])
    assert one.condition.shape == (6, 20, 1, 2, 2)
    assert not one.condition.any()
    assert many.condition.any()


def test_words_that_no_caption_has_mean_nothing() -> None:
    torch.manual_seed(0)
    table = train.Trunk().text.token_embd.weight
    rows = {token: k + 1 for k, token in enumerate(tokens.used())}
    assert not table[rows[tokens.table()["three"][0]]].any()
    assert all(table[rows[i]].any() for word in grammar.words() for i in tokens.table()[word])


def test_pieces_are_read() -> None:
    assert list(train.pieces(["vae:1.5", "trunk:3:400"])) == [("vae", 1.5, 0), ("trunk", 3.0, 400)]
    for word, said in (("tree:1", "tree:1 is no piece"), ("vae", "vae is no piece"), ("vae:0", "minutes above 0")):
        with pytest.raises(ValueError, match=said):
            list(train.pieces([word]))


def test_a_stage_needs_the_one_before(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no finished vae\.ema: train the stage before this one first"):
        state.load(vae.WanVae(VaeSize(8, 8)), tmp_path, "vae")
    assert set(train.RATES) == set(train.DECAYS) == set(train.BATCHES) == set(train.STAGES)
