"""Every message of every public function, as they are frozen: a change that sends more, or other ones, is meant or
wrong."""

import freezing
import pytest
from sweep import BUILDERS, Setting, _tuple

import distdl as dd
from distdl.testing import collective_assert, count_messages

pytestmark = pytest.mark.skipif(dd.world().size != 2, reason="frozen on 2 ranks")


def text(sent):
    """Messages in words: "send 48 to 1, all_reduce 8, agree", whose bytes are its text's."""
    return ", ".join(
        kind + ("" if kind == "agree" else f" {size}") + (f" to {to}" if kind == "send" else "")
        for kind, to, size in sent
    )


def test_messages():
    now = {}
    for name, build in BUILDERS.items():
        for setting in ("first", "last", "channels"):
            call = build(Setting(setting))
            inputs = [x.requires_grad_() if x.is_floating_point() else x for x in call.parts()]
            with count_messages() as forward:
                ys = _tuple(call.run(*inputs))
            with count_messages() as backward:
                if any(y.requires_grad for y in ys):
                    call.loss(ys).backward()
            now[f"{name} [{setting}]"] = f"{text(forward)} | {text(backward)}"
    differs = freezing.compare(f"messages.{dd.world().rank}of2", now)
    collective_assert(not differs, f"messages differ (make refreeze, if that is meant):\n{differs}")
