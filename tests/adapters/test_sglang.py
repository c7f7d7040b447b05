"""Requests of SGLang, against the source of its own classes.

SGLang is installed without its dependencies, and its modules cannot be imported without a GPU's
libraries. So the class of a request is taken out of its module's source, unchanged, and run. No
engine is run.
"""

import ast
import copy
import dataclasses
import enum
import functools
import importlib.util
import typing
import uuid
from collections import Counter
from pathlib import Path

import pytest

import kalos_ctx as kalos
from kalos_ctx.adapters import sglang
from kalos_ctx.adapters.engine_prompts import cache_salt

SECRET = b"known to the servers alone"


@pytest.fixture
def store(tmp_path):
    with kalos.SessionStore.open(tmp_path / "store", vocab_size=1000) as opened:
        for tenant in ("", "acme", "globex"):
            opened.append("s", "user", token_ids=range(10, 40), tenant=tenant)
            opened.append("t", "user", token_ids=[7, 8, 9], tenant=tenant)
            opened.set_segment("empty", "head", token_ids=[1], tenant=tenant)
        yield opened


@pytest.fixture
def assembler(store):
    with kalos.ContextAssembler(store) as made:
        yield made


def sglang_file(name):
    spec = importlib.util.find_spec("sglang")
    return Path(spec.submodule_search_locations[0], "srt", name)


def request_class_alone():
    """Return SGLang's `GenerateReqInput`: its own source, run without the rest of its module.

    Its annotations are text, as the module asks for, and name what is not there; only what its
    methods call while a request of token IDs is brought into form is taken along.
    """
    body = []
    for name, wanted in (
        ("model_executor/forward_batch_info.py", {"CaptureHiddenMode"}),
        ("managers/schedule_batch.py", {"get_return_hidden_states_mode"}),
        ("managers/io_struct.py", {"GenerateReqInput"}),
    ):
        tree = ast.parse(sglang_file(name).read_text(encoding="utf-8"))
        body += [node for node in tree.body if getattr(node, "name", None) in wanted]
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    module = ast.fix_missing_locations(ast.Module([future, *body], []))
    around = {
        "Any": typing.Any, "Counter": Counter, "IntEnum": enum.IntEnum, "copy": copy,
        "dataclass": dataclasses.dataclass, "field": dataclasses.field, "uuid": uuid,
        "total_ordering": functools.total_ordering, "__name__": __name__,
    }  # fmt: skip
    exec(compile(module, "sglang", "exec"), around)
    return around["GenerateReqInput"]


@pytest.fixture(scope="module")
def request_class():
    return request_class_alone()


@pytest.fixture(scope="module")
def validator():
    path = sglang_file("utils/field_validators.py")
    spec = importlib.util.spec_from_file_location("field_validators", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.validate_optional_list_i64_1d_2d


def normalised(request_class, fields):
    made = request_class(**fields)
    made.normalize_batch_and_arguments()
    return made


@pytest.mark.parametrize("salt_field", ["cache_salt", "extra_key"])
def test_sglang_request_is_one_prompt(request_class, validator, assembler, salt_field):
    with assembler.assemble("s", tenant="acme", max_tokens=99) as window:
        fields = sglang.generate_arguments(
            window, max_model_len=99, reserve=8, secret=SECRET, salt_field=salt_field
        )
    assert validator(fields["input_ids"]) is fields["input_ids"]
    made = normalised(request_class, fields)
    assert made.is_single
    assert made.input_ids == list(range(10, 40))
    assert getattr(made, salt_field) == cache_salt("acme", SECRET)
    assert made.sampling_params == {"max_new_tokens": 8}


def test_sglang_batch_is_one_request_with_a_row_a_window(request_class, validator, assembler):
    requests = [{"session": name, "tenant": "acme", "max_tokens": 99} for name in "st"]
    batch = assembler.assemble_batch(requests)
    fields = sglang.batch_arguments(
        batch, max_model_len=99, reserve=8, sampling_params={"temperature": 0.5}
    )
    assert validator(fields["input_ids"]) is fields["input_ids"]
    made = normalised(request_class, fields)
    assert (made.is_single, made.batch_size) == (False, 2)
    assert made.input_ids == [list(range(10, 40)), [7, 8, 9]]
    assert made.sampling_params == [{"temperature": 0.5, "max_new_tokens": 8}] * 2
    assert made.cache_salt == [cache_salt("acme")] * 2


def test_sglang_engine_has_parameters_of_these_names():
    tree = ast.parse(sglang_file("entrypoints/engine.py").read_text(encoding="utf-8"))
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name in ("generate", "async_generate")
    ]
    assert len(found) == 2
    for function in found:
        names = {one.arg for one in (*function.args.args, *function.args.kwonlyargs)}
        assert {"input_ids", "sampling_params", "cache_salt"} <= names


def test_sglang_wrong_arguments_are_refused(assembler):
    with assembler.assemble("s", max_tokens=99) as window:
        options = {"max_model_len": 99, "reserve": 8}
        with pytest.raises(kalos.InvalidArgument, match="salt_field must be one of"):
            sglang.generate_arguments(window, **options, salt_field="salt")
        with pytest.raises(kalos.InvalidArgument, match="max_new_tokens = reserve, 8"):
            sglang.generate_arguments(window, **options, sampling_params={"max_new_tokens": 9})
    with pytest.raises(kalos.InvalidArgument, match="at least 1 window"):
        sglang.batch_arguments([], **options)
    batch = assembler.assemble_batch([{"session": "unknown", "max_tokens": 9}], on_error="return")
    with pytest.raises(kalos.SessionNotFound):
        sglang.batch_arguments(batch, **options)
