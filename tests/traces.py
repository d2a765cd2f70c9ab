"""What Chrome's trace format asks for, for tests of timelines."""


def check(found):
    """What Chrome's format asks for (the trace-event document's required fields), and the order of what is shown."""
    shown = [e for e in found["traceEvents"] if e["ph"] != "M"]
    for e in found["traceEvents"]:
        assert {"ph", "pid", "tid", "name"} <= e.keys() and e["ph"] in "MXsf"
        if e["ph"] == "M":
            assert e["name"] in ("process_name", "process_sort_index", "thread_name") and e["args"]
        else:
            assert e["ts"] >= 0 and e["cat"]
        if e["ph"] == "X":
            assert e["dur"] >= 0 and e["args"]
    times = [e["ts"] for e in shown]
    assert times == sorted(times)
    starts, ends = ({e["id"]: e for e in shown if e["ph"] == kind} for kind in "sf")
    assert starts.keys() == ends.keys() and len(starts) == found["otherData"]["messages"]
    assert sum(e["ph"] in "sf" for e in shown) == 2 * len(starts), "each number once at each end"
    for number, e in starts.items():
        f = ends[number]
        assert f["bp"] == "e" and f["name"] == e["name"] and f["cat"] == e["cat"] and f["ts"] >= e["ts"]
        for end in (e, f):  # an arrow belongs to the slice around it
            assert any(s["ph"] == "X" and (s["pid"], s["tid"]) == (end["pid"], end["tid"])
                       and s["ts"] <= end["ts"] <= s["ts"] + s["dur"] for s in shown)  # fmt: skip
    return shown, starts, ends
