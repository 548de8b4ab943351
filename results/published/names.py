"""The papers' names of models and systems, as this project calls them."""

# A paper's network -> the entry of the zoo that stands for it. What is not here has the same name, or no entry.
MODELS = {
    "nasnet_a_mobile": "nasnet",
    "nasnet_a_large": "nasnet_large",
    "vgg": "vgg16",
    "sample_network": "ios_sample",
    "last block of inception_v3": "inception_v3_last_block",
    "nasnet": "nasnet_large",  # IOS's: of its 374 operators (Table 2) the mobile one, which is our nasnet, has too few
}
# The same for trained networks, whose input is CIFAR-10's.
TRAINED = {model: f"{model}_cifar10" for model in ("mobilenet_v2", "efficientnet_b0", "resnet50")}
# A paper's system -> the choice of conf/system/ that stands for it.
SYSTEMS = {
    "ios_both": "ios",
    "scheduling_minimized": "nimble_single_stream",
    "tvm_autotuned": "tvm_tuned",
    "tvm_cudnn": "tvm",
}
# Where a paper gives a range, or a mean over its networks, in the place of a network.
NO_MODEL = ("", "geomean", "range", "up to", "all four")
