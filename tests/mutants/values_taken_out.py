"""What gives a replacement the values of its predecessor, and is taken out of the worker: see `proofs`."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SAVED_ALIKE = "tests/jobs/test_case_saved.py::test_it_is_as_undisturbed"
SAVED = "tests/jobs/test_case_saved.py::test_what_nobody_can_tell_is_refused"
LYING = "tests/process/test_lying_gradients.py"
OWN_STATE = "tests/jobs/test_case_own_state.py::test_it_is_as_undisturbed"
OWN_REFUSED = "tests/jobs/test_case_own_state.py::test_what_cannot_be_told_is_refused"
VALUES = (
    Mutant(
        "drawn: states of generators in variables are not told", "worker/hidden_state/variables.py",
        "{}, {}, {}, [], [], generators.told_in(local))", "{}, {}, {}, [], [], {})",
        ("tests/jobs/test_case_drawn_with_items.py::test_it_is_as_undisturbed[numpy]",),
    ),
    Mutant(
        "drawn: a call has no random state", "worker/replacement/taking_over.py",
        "            random_state.restore(since.drawn)  #", "            pass  #",
        ("tests/jobs/test_case_before_a_section.py::test_it_is_as_undisturbed[draw-grad:31:1]",),
    ),
    Mutant(
        "plain: an item does not tell learning rates", "worker/data/loops.py",
        "kept, along, self._plain_values())", "kept, along)",
        ("tests/jobs/test_case_before_a_section.py::test_it_is_as_undisturbed[rate-head-grad:25:1]",),
    ),
    Mutant(
        "plain: a call does not tell those of the return before it", "worker/replacement/taking_over.py",
        'b"" if since is None else since.plain', 'b""',
        ("tests/jobs/test_case_before_a_section.py::test_it_is_as_undisturbed[rate-two-grad:27:1]",),
    ),
    Mutant(
        "plain: what is told is the whole, whatever else there is", "worker/retry/plain.py",
        "len(told) == len(found)", "True", ("tests/unit/worker/retry/test_plain.py",),
    ),
    Mutant(
        "lying: gradients of another network begin at zero again", "worker/retry/redo.py",
        "Gradients(self._has_gradient, lying)", "Gradients(self._has_gradient, {})",
        (f"{LYING}::test_a_call_that_is_made_again_reads_what_it_read",),
    ),
    Mutant(
        "lying: those that calls change are not copied", "worker/state/gradients.py",
        "        self._changed.update(found.changed)\n", "",
        (f"{LYING}::test_a_call_that_is_made_again_reads_what_it_read",),
    ),
    Mutant(
        "lying: a replacement gets zeros", "worker/state/state.py",
        "Gradients(self._arrived[\"gradients\"], values)", "Gradients(self._arrived[\"gradients\"], {})",
        (f"{LYING}::test_they_go_to_a_replacement_with_the_state",),
    ),
    Mutant(
        "lying: a second update of a call may take what was carried", "worker/retry/redo.py",
        "        if self._lying_here:\n", "        if False:\n",
        (f"{LYING}::test_nor_what_a_second_optimizer_takes_behind_the_gate",),
    ),
    Mutant(
        "lying: in the first calls only what was seen to lie there counts", "worker/state/state.py",
        "self.apart is not False and", "self.apart is True and",
        (f"{LYING}::test_until_it_is_known_whether_they_do_all_count",),
    ),
    Mutant(
        "saved: what changes between two calls is not compared", "worker/replacement/taking_over.py",
        "            self._keeping(self._between.check)\n", "            pass\n", (f"{SAVED}[mean]",),
    ),
    Mutant(
        "saved: what ranks save of their own is let pass", "worker/agreement/comparing.py",
        "            if self._state.saves:\n", "            if False:\n",
        (f"{SAVED}[own]",),
    ),
    Mutant(
        "saved: a schedule is a step ahead", "worker/retry/returned.py",
        "        plain.put(_marks(state), arrived[SAVED])\n", "        pass\n", (f"{SAVED_ALIKE}[schedule-grad:25:1]",),
    ),
    Mutant(
        "saved: load() puts another rank's statistics there", "worker/state/private.py",
        "                buffer.copy_(value)\n", "                pass\n", (f"{SAVED_ALIKE}[norm-grad:25:1]",),
    ),
    Mutant(
        "saved: statistics seem to stand still", "worker/retry/redo.py",
        "self._probe.look(moving) if moving else {}", "{}",
        (f"{SAVED_ALIKE}[norm-grad:25:0]",),
    ),
    Mutant(
        "own: a record does not tell", "worker/state/private.py",
        "own = self.own.told()\n        rest", "own: dict[str, bytes] = {}\n        rest",
        (f"{OWN_STATE}[meter-grad:25:1]",),
    ),
    Mutant(
        "own: another rank's values come with the state", "worker/state/private.py",
        "            self.own.take(own)\n", "            pass\n", (f"{OWN_STATE}[tensor-grad:25:1]",),
    ),
    Mutant(
        "own: and when a call returns", "worker/retry/returned.py",
        "own = part.path in state.private.own.paths", "own = False", (f"{OWN_STATE}[dict-grad:25:1,grad:41:0]",),
    ),
    Mutant(
        "own: what is behind a gate is not lost", "worker/retry/late.py",
        "if before.own.get(path, told) != told}", "if False}", (f"{OWN_REFUSED}[inside]",),
    ),
    Mutant(
        "own: buffers are never", "worker/agreement/comparing.py",
        "    buffers = state.private.compared()\n", "    buffers = {}\n", (f"{OWN_STATE}[buffer-grad:25:1]",),
    ),
    Mutant(
        "drawn: an item has no random state", "worker/data/loops.py",
        "drawn = random_state.capture()  #", 'drawn = b""  #',
        ("tests/jobs/test_case_drawn_with_items.py::test_it_is_as_undisturbed[workers]",),
    ),
    Mutant(
        "way: nothing is seen before the last call", "worker/replacement/taking_over.py",
        "            self._way.begin()\n", "            return\n",
        ("tests/jobs/test_case_before_a_section.py::test_it_is_as_undisturbed[save-grad:31:0]",),
    ),
    Mutant(
        "way: all sections leave the state as it is", "worker/data/cursor.py",
        "known and all(call.still for call in ahead)", "known", ("tests/unit/worker/data/test_cursor.py",),
    ),
    Mutant(
        "way: a section is still whatever it does", "worker/retry/returned.py",
        "return signature(self._state) == entered.tensors", "return True",
        ("tests/unit/worker/retry/test_returned.py",),
    ),
    Mutant(
        "way: values are not those of the place", "worker/replacement/taking_over.py",
        "            moved = returned.take(self._state, ahead.before)\n", "            pass\n",
        ("tests/jobs/test_case_before_a_section.py::test_it_is_as_undisturbed[norm-grad:31:1]",),
    ),
    Mutant(
        "way: parameters may be read and changed", "worker/replacement/torch_functions.py",
        "if targets & self._read or read & self._written:", "if False:",
        ("tests/unit/worker/replacement/test_way.py",),
    ),
)  # fmt: skip
