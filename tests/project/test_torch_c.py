"""Our declarations of PyTorch's C functions, compared with the headers of the PyTorch that is installed."""

from __future__ import annotations

import re
from pathlib import Path

import torch

HEADERS = "inductor/aoti_torch/c/shim.h", "stable/c/shim.h"
NEWER = {"torch_tensor_to_pyobject"}  # than the oldest PyTorch that is served


def _types(parameters: str) -> list[str]:
    """The types of parameters, without names and comments, as our header writes them."""
    found = []
    for parameter in re.sub(r"//[^\n]*", "", parameters).split(","):
        text = " ".join(parameter.split())
        if text:
            text = re.sub(r"\s*\w+$", "", text) if " " in text else text
            found.append(text.replace("AtenTensorHandle", "TensorHandle").replace(" *", "*"))
    return found


def _declared(text: str, pattern: str) -> dict[str, tuple[str, list[str]]]:
    return {
        name: (result.replace("AOTITorchError", "int32_t"), _types(parameters))
        for result, name, parameters in re.findall(pattern, text)
    }


def test_the_functions_are_declared_as_in_pytorch() -> None:
    ours = _declared(
        Path("ep_plugin/csrc/control/torch_c.h").read_text(), r"\b(\w+) \(\*((?:aoti_)?torch_\w+)\)\(([^)]*)\);"
    )
    assert len(ours) >= 6
    include = Path(torch.__file__).parent / "include/torch/csrc"
    text = "".join((include / header).read_text() for header in HEADERS)
    theirs = _declared(text, r"AOTI_TORCH_EXPORT\s+(\w+)\s+(\w+)\(([^)]*)\);")
    for name, declared in ours.items():
        if name in NEWER and name not in theirs:
            assert tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14)
        else:
            assert declared == theirs[name], name
