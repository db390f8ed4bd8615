"""cases.md G2: nothing that arrives from outside is ever run as code. And: no bare forks."""

import ast

import pytest

from tests.tidy.sources import PRODUCT, Source, dotted_name, imported_modules, sources

UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load",
    "yaml.unsafe_load", "yaml.full_load", "torch.hub.load", "torch.jit.load",
}  # fmt: skip
# In the Pythons we support these default to fork, which copies locks that other threads hold.
FORKING_CALLS = {
    "os.fork", "os.forkpty", "pty.fork", "multiprocessing.Process", "multiprocessing.Pool",
    "multiprocessing.Manager", "mp.Process", "mp.Pool", "mp.Manager",
}  # fmt: skip


def keywords(call: ast.Call) -> dict[str | None, ast.expr]:
    return {keyword.arg: keyword.value for keyword in call.keywords}


def is_constant(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def runs_input(call: ast.Call) -> bool:
    """Whether a call may run what it is given as code."""
    name, named = dotted_name(call.func), keywords(call)
    if name == "torch.load":
        return not is_constant(named.get("weights_only"), True)
    if name.endswith((".load", ".loads")) and "allow_pickle" in named:
        return not is_constant(named["allow_pickle"], False)
    return name in UNSAFE_CALLS or is_constant(named.get("shell"), True)


def forks(call: ast.Call) -> bool:
    """Whether a call starts a process by fork, or by a default that is fork."""
    name = dotted_name(call.func)
    if name.endswith(("get_context", "set_start_method")):
        return not call.args or is_fork(call.args[0])
    if name.endswith("ProcessPoolExecutor"):
        return "mp_context" not in keywords(call)
    return name in FORKING_CALLS


def is_fork(node: ast.expr) -> bool:
    return not isinstance(node, ast.Constant) or node.value not in ("spawn", "forkserver")


def calls(found: tuple[Source, ...]) -> list[tuple[Source, ast.Call]]:
    return [
        (source, node)
        for source in found
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
    ]


def test_g2_no_module_that_runs_what_it_reads():
    wrong = [
        f"{source.at(node)} {module}"
        for source in sources(*PRODUCT)
        for module, node in imported_modules(source)
        if module.split(".")[0] in UNSAFE_MODULES
    ]
    assert not wrong, wrong


def test_g2_no_call_that_runs_what_it_is_given():
    wrong = [source.at(call) for source, call in calls(sources(*PRODUCT)) if runs_input(call)]
    assert not wrong, wrong


def test_helper_processes_are_never_forked():
    wrong = [source.at(call) for source, call in calls(sources(*PRODUCT)) if forks(call)]
    assert not wrong, wrong


@pytest.mark.parametrize(
    "code",
    [
        "eval(text)",
        "exec(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text, Loader)",
        "subprocess.run(text, shell=True)",
    ],
)
def test_g2_the_check_finds_what_it_looks_for(code):
    assert runs_input(ast.parse(code, mode="eval").body)


@pytest.mark.parametrize("code", ["torch.load(p, weights_only=True)", "re.compile(p)", "m.eval()"])
def test_g2_the_check_leaves_the_rest_alone(code):
    assert not runs_input(ast.parse(code, mode="eval").body)


@pytest.mark.parametrize(
    "code", ["os.fork()", "get_context('fork')", "get_context()", "ProcessPoolExecutor(2)"]
)
def test_the_check_finds_forks(code):
    assert forks(ast.parse(code, mode="eval").body)
