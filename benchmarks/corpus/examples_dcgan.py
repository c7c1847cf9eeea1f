"""An adversarial network of convolutions: two backward calls for the discriminator, a third for the generator."""

REPOSITORY, COMMIT = "https://github.com/pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8"
SCRIPT = "dcgan/main.py"
ARGS = ["--dataset", "fake", "--workers", "0", "--niter", "1", "--ngf", "8", "--ndf", "8", "--imageSize", "64"]
NEEDS = ("torchvision==0.28.0",)
HERE = [("dataset = dset.FakeData(", "dataset = dset.FakeData(256, image_size=(3, opt.imageSize, opt.imageSize),")]
EDITS = [
    ("import argparse", "import anyorder as ao\n..."),
    ("netD = Discriminator(ngpu)", "netD = ao.clipping.convert(Discriminator(ngpu)).to(device)"),
    (
        "for epoch in range(opt.niter)",
        """
        plan = ao.plan(loader=dataloader, epochs=opt.niter, epsilon=8, delta=1e-5, optimizer=optimizerD)
        netD, optimizerD, dataloader = ao.PrivacyEngine(plan).make_private(netD, optimizerD, dataloader)
        ...
        """,
    ),
    ("errD_real.backward()", ""),
    ("label.fill_(fake_label)", "label = torch.full_like(label, fake_label)"),
    ("errD_fake.backward()", "(errD_real + errD_fake).backward()"),
]
OPACUS = [
    ("import argparse", "import opacus\n..."),
    ("netD = Discriminator(ngpu)", "netD = opacus.validators.ModuleValidator.fix(Discriminator(ngpu)).to(device)"),
    (
        "for epoch in range(opt.niter)",
        """
        netD, optimizerD, dataloader = opacus.PrivacyEngine(accountant="rdp").make_private(
            module=netD, optimizer=optimizerD, data_loader=dataloader, noise_multiplier=1.0, max_grad_norm=1.0)
        ...
        """,
    ),
    ("errD_real.backward()", ""),
    ("label.fill_(fake_label)", "label = torch.full_like(label, fake_label)"),
    ("errD_fake.backward()", "(errD_real + errD_fake).backward()"),
]
MODEL = "changed: BatchNorm of the discriminator became GroupNorm, by `convert`"
RESULT, WHY = "runs", "two backward calls of a step are one, of the sum of both losses; the generator is not changed"
