"""What the package uses of PyTorch's private parts: each is named here, and is still there in the installed version.

A failure names the attribute that a new PyTorch has moved, before anything else fails for a reason hard to see.
"""

import ast
import re
from pkgutil import resolve_name

import pytest
from project import files

from mpdemo.paths import root

SAME = "mpdemo/tools/same"
WATCHER = "tools/same/mpdemo_watcher/private_torch.py"
METHODS = {  # of objects, which no import shows
    "torch._subclasses.fake_tensor.FakeTensorMode.avoid_device_init": "models/private_torch.py",
    "torch.autograd.Variable._execution_engine.run_backward": "models/private_torch.py",
    "torch.distributed.pipelining.PipelineStage._get_init_p2p_neighbors_ops": "models/private_torch.py",
    "torch.cuda._lazy_init": WATCHER,
    "torch.distributed.pipelining.stage._PipelineStageBase": WATCHER,
    "torch.nn.SyncBatchNorm._check_input_dim": WATCHER,
    "torch.utils.data.dataloader._BaseDataLoaderIter.__next__": WATCHER,
    "torch.utils.data.DataLoader._index_sampler": WATCHER,
    "torch.utils.data._utils.fetch._MapDatasetFetcher.fetch": WATCHER,
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.foreach_reduce": WATCHER,
    "torch.UntypedStorage._cdata": WATCHER,
    "torch.distributed.pipelining.PipelineStage.forward_one_chunk": "training/recorder.py",
    "torch.distributed.pipelining.PipelineStage.backward_one_chunk": "training/recorder.py",
    "torch.distributed.pipelining.PipelineStage.backward_weight_one_chunk": "training/recorder.py",
    "torch.UntypedStorage.resize_": "predict/counting.py",
}


def names_in(text) -> set:
    """Return the dotted names of private parts of PyTorch that a program imports or reads."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
    return {name for name in found if re.fullmatch(r"torch(\.\w+)*\._[a-z]\w*(\.\w+)*", name)}


PACKAGE = [file for file in files() if file.suffix == ".py" and file.parts[0] == "mpdemo"]
USED = {name: str(file) for file in PACKAGE for name in sorted(names_in((root() / file).read_text()))}


@pytest.mark.parametrize("name", sorted({**USED, **METHODS}))
def test_a_private_part_of_pytorch_is_still_there(name):
    try:
        resolve_name(name)
    except AttributeError:
        pytest.fail(f"PyTorch has no {name} any more; {(USED | METHODS)[name]} uses it")


def test_only_one_module_of_same_uses_private_parts():
    """Also of objects, whose class no scan can tell: any name after a dot that begins with one underscore."""
    for file in (
        file
        for file in PACKAGE
        if file.is_relative_to("mpdemo/tools/same") and file.name != "private_torch.py"
    ):
        text = (root() / file).read_text()
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)]
        private = {ast.unparse(node) for node in nodes if re.match(r"_[a-z]", node.attr)}
        assert names_in(text) | private <= {"atexit._run_exitfuncs", "os._exit", "sys._getframe"}, file


def test_the_scan_sees_imports_and_attributes():
    text = "from torch._a.b import C, D\nfrom torch.x import _e\nimport torch._f, torch.nn\ntorch.cuda.memory._g()\n"
    assert names_in(text) == {
        "torch._a.b.C",
        "torch._a.b.D",
        "torch.x._e",
        "torch._f",
        "torch.cuda.memory._g",
    }
