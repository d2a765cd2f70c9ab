"""Mutants that change no result, and why: per module, the statement on one line, what was done there, and the reason.

They are not judged, and count as alive; ``python tests/mutation --argued`` judges them alone.
``tests/test_structure.py`` sees to it that each is still a mutant: where its statement has changed, an entry goes, or is argued again.
"""

EQUIVALENT: dict[str, dict[str, dict[str, str]]] = {
    "boxes": {
        "if other[0][0] >= box[0][1]:": {
            "GtE -> Gt": "where the search for two boxes that meet may stop: time only",
        },
        "break": {
            "jump removed": "where the search for two boxes that meet may stop: time only",
        },
    },
    "plan": {
        "found = sorted(((start, stop, c) for c, runs in enumerate(self.runs) for start, stop, _ in runs if start < stop))": {
            "without its filter": "an empty run among the candidates meets nothing, which is found out when the overlaps are taken",
            "Lt -> LtE": "an empty run among the candidates meets nothing, which is found out when the overlaps are taken",
        },
        "return Axis(dim, tuple((() if k is None else ((k, k + 1, 0),) for k in keys)), None)": {
            "0 -> 1": "the local tensor lacks the dim: only that the place is the same under every key matters",
        },
        "programs: dict[Any, Any] = field(default_factory=dict, repr=False)": {
            "False -> True": "wording",
        },
    },
    "engine.recognise": {
        "return len(first.boxes) > 1 or len(boxes) > 64 or collide([[(a, a + n) for a, n in zip(*box)] for box in boxes])": {
            "Gt -> GtE (2)": "how many boxes are too many to ask whether they pile up: the answer is then yes, always right",
            "64 -> 65": "how many boxes are too many to ask whether they pile up: the answer is then yes, always right",
        },
    },
    "engine.dispatch": {
        "traffic.begun += 1": {
            "Add -> Sub": "what reads it asks whether it has changed, not how",
            "1 -> 2": "what reads it asks whether it has changed, not how",
            "Add -> Sub (2)": "what reads it asks whether it has changed, not how",
            "1 -> 2 (2)": "what reads it asks whether it has changed, not how",
        },
        "if len(steps) > 1 or not is_plain(x):": {
            "Gt -> GtE": "one plain tensor passes the check, which takes its time"
        },
    },
    "linear_map": {
        "return held.world == wanted.world and max(self.plan.ranks) < self.world.size": {
            "returns None": "remembers that a map fits its world; where that is not known the world is asked again, at each call",
        },
    },
    "autograd": {
        "if _grad_enabled() and any(map(_requires_grad, (*xs, *ties))) or (_forward_mode_active() and _have_tangents(xs, ties)):": {
            "and <-> or (3)": "a node without tangents is made in forward mode, for nothing: the same values, slower",
        },
        "if len(steps) == 1 and given[0] is not None and (given[0].dtype == like[0][1]):": {
            "Eq -> NotEq (2)": "the short way for one operand: what follows gives the same in more time",
            "1 -> 2 (2)": "the short way for one operand: what follows gives the same in more time",
        },
        "return x.new_empty(0, dtype=torch.float32)": {
            "0 -> 1": "a tie has no value that anything reads: only what it depends on matters",
        },
        "xs = args[:len(steps)]": {
            "without its stop": "what follows takes as many operands as there are maps, and the ties come after them",
        },
        "*ys, s = apply(steps, args[:n], args[n:], pending, tied)": {
            "without its stop": "what follows takes as many operands as there are maps, and the ties come after them",
        },
        "ctx.set_materialize_grads(False)": {
            "call removed": "a missing cotangent comes as zeros instead of being made zeros here: time and memory only",
            "False -> True": "a missing cotangent comes as zeros instead of being made zeros here: time and memory only",
        },
    },
    "engine.part": {
        "place: int = 0": {
            "0 -> 1": "every part that is staged gets its place before it is used",
        },
        "if min(step) > 0 and (len(run) == 1 or step == (run[1].offset - run[0].offset, run[1].place - run[0].place)):": {
            "Gt -> GtE": "one box for two peers is then packed by one copy that reads it twice (a step of 0) instead of by two",
        },
    },
    "engine.program": {
        "ends.append((-1, end))": {
            "without USub": "the scratch memory comes after the only tensor, so that it is number 1 as well as the last",
        },
        "_SMALL = 2 ** 16": {
            "16 -> 17": "a size from which memory is kept apart: time and memory only",
        },
        "for peer, parts in sorted(by_peer.items()):": {
            "sorted -> list": "the order in which messages are posted, and lie in the scratch memory of one rank",
        },
        "small = _parts(next((m for m in view.received if m.peer == rank)), *about, dense(shape))": {
            "without its filter": "in a reduce-scatter each arrival fills the rank's whole block: all have the same box",
            "Eq -> NotEq": "in a reduce-scatter each arrival fills the rank's whole block: all have the same box",
        },
    },
    "engine.exchange": {
        "base = 0": {
            "0 -> 1": "nothing is reckoned from it where nothing is staged",
        },
        "pending[rank] = Exchange((plan,), [x], LocalTransport(rank, max(ranks) + 1, mailboxes))": {
            "1 -> 2": "how many ranks a simulated world has besides those of the plan",
        },
    },
    "movement.call": {
        "made = lru_cache(maxsize=1024, typed=True)(build)": {
            "1024 -> 1025": "how many maps are remembered: memory and time only",
        },
    },
}
