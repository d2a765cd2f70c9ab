"""Mutants that change no result, and why: per module, the line's text, what was done there, and the reason.

They are not judged, and count as alive; ``python tests/mutation --argued`` judges them alone. ``tests/test_structure.py`` sees to
it that each is still a mutant: where its line has changed, an entry goes, or is argued again.
"""

EQUIVALENT: dict[str, dict[str, dict[str, str]]] = {
    "exchange": {
        "_SMALL = 2**16  # bytes of staging memory that a program keeps for itself: views cost more than copies then": {
            "16 -> 17": "a size from which memory is kept apart: time and memory only"},
        "place: int = 0  # bytes": {
            "0 -> 1": "every part that is staged gets its place before it is used"},
        "for peer, parts in sorted(by_peer.items()):": {
            "sorted -> list": "the order in which messages are posted, and lie in the scratch memory of one rank"},
        "if min(step) > 0 and (len(run) == 1 or step == (run[1].offset - run[0].offset, run[1].place - run[0].place)):": {
            "Gt -> GtE": "one box for two peers is then packed by one copy that reads it twice (a step of 0) instead of by two"},
        "small = _parts(next(m for m in view.received if m.peer == rank), *about, _dense(shape))": {
            "without its filter": "in a reduce-scatter each arrival fills the rank's whole block: all have the same box",
            "Eq -> NotEq": "in a reduce-scatter each arrival fills the rank's whole block: all have the same box"},
        "ends.append((-1, end))": {
            "1 -> 2": "any negative number stands for scratch memory"},
        "limit = 2**30  # bytes kept for later": {
            "2 -> 3": "how much memory is kept for later: time and memory only",
            "30 -> 31": "how much memory is kept for later: time and memory only"},
        "base = 0": {
            "0 -> 1": "nothing is reckoned from it where nothing is staged"},
        "pending[rank] = Pending((plan,), [x], LocalTransport(rank, max(ranks) + 1, mailboxes))": {
            "1 -> 2": "how many ranks a simulated world has besides those of the plan"},
    },
}  # fmt: skip
