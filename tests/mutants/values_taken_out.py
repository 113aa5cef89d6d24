"""What gives a replacement the values of its predecessor, and is taken out of the worker: see `proofs`."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

GIVES_WAY = "tests/unit/worker/hidden_state/test_gives_way.py"
BY_HAND = "tests/unit/worker/hidden_state/test_by_hand.py"
SAVED_ALIKE = "tests/jobs/test_case_saved.py::test_it_is_as_undisturbed"
SAVED = "tests/jobs/test_case_saved.py::test_what_nobody_can_tell_is_refused"
LYING = "tests/process/test_lying_gradients.py"
KEPT_TENSORS = "tests/unit/worker/hidden_state/test_hidden_places.py"
HUNG = "tests/unit/worker/hidden_state/test_hung.py"
WITHHELD = "tests/unit/worker/state/test_withheld.py"
ELSEWHERE = "tests/jobs/test_case_set_elsewhere.py"
LENT = "tests/unit/worker/state/test_lent.py"
LIBRARIES = "tests/unit/worker/hidden_state/test_libraries.py"
OF_LIBRARIES = "tests/jobs/test_case_of_libraries.py::test_a_fault_is_refused_by_the_name_of_the_object"
RECURRENT = "tests/jobs/test_case_recurrent.py::test_what_an_update_has_left_is_not_taken_from_another_rank"
STILL = "tests/unit/worker/hidden_state/test_still.py"
ORDINARY = "tests/jobs/test_case_ordinary.py"
OBJECTS = "test_what_objects_hold_is_as_it_was_wherever_the_script_asks"
DOERS = "tests/unit/worker/hidden_state/test_doers.py"
TWO_STEPS = "tests/jobs/test_case_two_steps.py"
BOUND_ANEW = "tests/jobs/test_case_bound_anew.py"
UNTOLD = "tests/unit/worker/hidden_state/test_untold.py"
RETURNED = "tests/unit/worker/retry/test_returned.py"
OWN_STATE = "tests/jobs/test_case_own_state.py::test_it_is_as_undisturbed"
OWN_REFUSED = "tests/jobs/test_case_own_state.py::test_what_cannot_be_told_is_refused"
VALUES = (
    Mutant(
        "drawn: states of generators in variables are not told", "worker/hidden_state/variables.py",
        "{}, {}, {}, [], [], generators.told_in(local))", "{}, {}, {}, [], [], {})",
        ("tests/unit/worker/hidden_state/test_variables.py",),
    ),
    Mutant(
        "library: what changes inside is not looked at", "worker/hidden_state/signatures.py",
        "(kind, id(value), contents(value)) if is_of_library(kind) else (kind, id(value))", "(kind, id(value))",
        (f"{OF_LIBRARIES}[sorted-step-grad]",),
    ),
    Mutant(
        "library: a fault is not refused for it", "worker/hidden_state/signatures.py",
        "lacking[path] = absent.say(path, absent.LIBRARY)", "absent.say(path, absent.LIBRARY)",
        (LIBRARIES,),
    ),
    Mutant(
        "library: what has changed once is not proved", "worker/hidden_state/signatures.py",
        "raise absent.not_ready(path)", "pass", (LIBRARIES,),
    ),
    Mutant(
        "library: what changes late is there", "worker/hidden_state/signatures.py",
        "return found, late - nowhere", "return found, set()", (LIBRARIES,),
    ),
    Mutant(
        "library: a call that has changed one is made again", "worker/hidden_state/signatures.py",
        "raise absent.in_place(path)", "pass", (LIBRARIES,),
    ),
    Mutant(
        "library: what an update has changed is not lost", "worker/hidden_state/signatures.py",
        "        self._after_gate = self._found\n", "        pass\n", (LIBRARIES,),
    ),
    Mutant(
        "library: nobody glances at them", "worker/hidden_state/signatures.py",
        "if thing is not None and glance_into(thing) != self._glances[at]:", "if False:", (LIBRARIES,),
    ),
    Mutant(
        "hung: only numbers and texts are seen", "worker/hidden_state/leaves.py",
        "not _is_machinery(at, value):", "type(value) in made.PLAIN:", (HUNG,),
    ),
    Mutant(
        "hung: options of optimizers are not looked at", "worker/hidden_state/leaves.py",
        "if name not in known] if defaults else []", "if False]", (HUNG,),
    ),
    Mutant(
        "hung: what is added to options is another rank's", "worker/state/parts.py",
        'return added_to(group, getattr(self.optimizer, "defaults", None))', "return []", (HUNG,),
    ),
    Mutant(
        "elsewhere: what is set on modules and classes of libraries", "worker/hidden_state/around.py",
        "        for thing, names in self._things.values():\n", "        for thing, names in ():\n",
        (f"{ELSEWHERE}::test_it_is_carried[class]",),
    ),
    Mutant(
        "elsewhere: data sets of torch's are not opened", "worker/hidden_state/graph.py",
        '        opened = opened or (data and str(kind.__module__).startswith("torch."))\n', "",
        (f"{ELSEWHERE}::test_it_is_carried[tensors]",),
    ),
    Mutant(
        "elsewhere: a loader's are not gone into", "worker/hidden_state/graph.py",
        "((at, fields[at]) for at in _OF_DATA if at in fields)", "()",
        (f"{ELSEWHERE}::test_it_is_carried[inline]",),
    ),
    Mutant(
        "elsewhere: hooks of parameters are seen seldom", "worker/retry/redo.py",
        "        if hooks != self._hooks:\n", "        if False:\n",
        (f"{ELSEWHERE}::test_or_refused[hook-is another function]",),
    ),
    Mutant(
        "elsewhere: hooks of all modules do not count", "worker/hidden_state/variables.py",
        "    yield leaves.GlobalHooks()\n", "", (f"{ELSEWHERE}::test_or_refused[hooks-is another function]",),
    ),
    Mutant(
        "elsewhere: memory of C is not looked at", "worker/hardware/raw_memory.py",
        "    inner = _buffer_in(value)\n", "    return False\n    inner = _buffer_in(value)\n",
        (f"{ELSEWHERE}::test_it_is_carried[shared]",),
    ),
    Mutant(
        "odd: the gradient of a tensor that is trained by hand is not told", "worker/tensors/by_hand.py",
        "            path, gradient = place.path, tensor.grad\n            if self",
        "            continue\n            if self", (BY_HAND,),
    ),
    Mutant(
        "odd: a gradient that is not here may be read", "worker/tensors/by_hand.py",
        "            if isinstance(one, AbsentGradient) and not harmless:\n", "            if False:\n", (BY_HAND,),
    ),
    Mutant(
        "odd: at a gate a gradient is taken to stay as it is", "worker/tensors/by_hand.py",
        "            if self._at_gate is not None:\n", "            if False:\n", (BY_HAND,),
    ),
    Mutant(
        "odd: what gives way to another tensor between calls is forgotten", "worker/hidden_state/moving.py",
        "(in_call or self._is_odd(path))", "in_call", (GIVES_WAY,),
    ),
    Mutant(
        "odd: a parameter of the script's own is not watched", "worker/hidden_state/still.py",
        "(type(value) is torch.nn.Parameter and of_state.is_free(value))", "False", (BY_HAND,),
    ),
    Mutant(
        "odd: equal values are the same", "worker/hidden_state/told.py",
        "bytes(value) for path, value, *_ in _parted(one)", "value for path, value, *_ in decode(one)", (GIVES_WAY,),
    ),
    Mutant(
        "odd: what is written by `.data` is not seen", "worker/hidden_state/signatures.py",
        'made.digest(value.detach()) if near else b""', 'b""', (BY_HAND,),
    ),
    Mutant(
        "odd: a gradient of a graph that is added to an absent one is known", "worker/tensors/by_hand.py",
        "            let_be_absent(tensor, self._path)\n\n\ndef", "            pass\n\n\ndef", (BY_HAND,),
    ),
    Mutant(
        "odd: a gradient stays where the predecessor has none", "worker/tensors/by_hand.py",
        "    if told == _NO_GRADIENT:\n        tensor.grad = None\n", "    if told == _NO_GRADIENT:\n", (BY_HAND,),
    ),
    Mutant(
        "odd: a sparse tensor is asked where it lies", "worker/tensors/memory.py",
        "    if not is_dense(tensor):\n        return (str", "    if False:\n        return (str",
        ("tests/unit/worker/tensors/test_memory_of_odd_tensors.py",),
    ),
    Mutant(
        "odd: an expanded tensor is written to as a dense one", "worker/tensors/memory.py",
        "        if step == 0 and to.shape[dimension] > 1:\n", "        if False:\n",
        ("tests/unit/worker/tensors/test_memory_of_odd_tensors.py",),
    ),
    Mutant(
        "elsewhere: settings of the process are not looked at", "worker/hidden_state/variables.py",
        "for name in NAMES)", "for name in ())", (f"{ELSEWHERE}::test_it_is_carried[dtype]",),
    ),
    Mutant(
        "elsewhere: a queue from which a thread takes counts", "worker/tensors/entries.py",
        "        _drained.add(waiting)\n", "", ("tests/unit/worker/tensors/test_entries.py",),
    ),
    Mutant(
        "withheld: what an earlier step has left may be read", "worker/state/gradients.py",
        "        withhold(name, parameter)\n", "        pass\n", (WITHHELD,),
    ),
    Mutant(
        "withheld: only the gradient itself is", "worker/state/withheld.py",
        "        if name in _WHOLE and sealed:\n", "        if False:\n", (WITHHELD,),
    ),
    Mutant(
        "withheld: what backward has added to may not be read", "worker/state/withheld.py",
        "_add_to(before()))", "None)", (WITHHELD,),
    ),
    Mutant(
        "withheld: torch's compiler may not look", "worker/state/withheld.py",
        ' or caller.f_globals.get("__name__", "").startswith(_COMPILER)', "", (WITHHELD,),
    ),
    Mutant(
        "hung: what changes where it lies is not put back", "worker/retry/marks.py",
        "[value for value in values if _is_changeable(value)]", "[]", (HUNG,),
    ),
    Mutant(
        "library: one that makes itself ready counts", "worker/hidden_state/signatures.py",
        "        again = {path for path in found if path in self._once and self._once[path]() is here[path]}\n",
        "        again = found\n",
        ("tests/jobs/test_case_of_libraries.py::test_what_is_for_people_and_what_makes_itself_ready_is_no_matter",),
    ),
    Mutant(
        "library: containers that keep more are filled", "worker/hidden_state/graph.py",
        "self._looks_into is not None and keeps_more(value)", "False", (f"{OF_LIBRARIES}[filed-step-grad]",),
    ),
    Mutant(
        "lent: digests of what ranks hold are not compared", "worker/state/lent.py",
        "known == 0 or own[-known:] != before[-known:]", "known == 0", (LENT,),
    ),
    Mutant(
        "lent: what has never changed before is taken", "worker/state/lent.py",
        "now == before[-1] or any(", "True or any(", (LENT,),
    ),
    Mutant(
        "lent: lenders are not compared with one another", "worker/state/lent.py",
        " or any(other[-1] != others[0][-1] for other in others)", "", (LENT,),
    ),
    Mutant(
        "lent: what nobody can tell is not taken away", "worker/hidden_state/hidden.py",
        "        self.state.put_absent(gone)\n", "", (LENT, f"{RECURRENT}[trainer-tuple-small-late-upd]"),
    ),
    Mutant(
        "lent: a generator is", "worker/hidden_state/hidden.py",
        "graph.is_generator(self.state.kept[path].read())", "False", (LENT,),
    ),
    Mutant(
        "lent: entries of a row are lent without it", "worker/hidden_state/hidden.py",
        "gone = [path.removesuffix(FRAME) for path in lost if not path.startswith(within)]", "gone = []", (LENT,),
    ),
    Mutant(
        "library: an odd value ends the look", "worker/hidden_state/signatures.py",
        "        except _ODD:  #", "        except KeyboardInterrupt:  #", (LIBRARIES,),
    ),
    Mutant(
        "lent: a record does not tell of the returns before it", "worker/state/private.py",
        "returns=self._returns.history", "returns={}", (LENT,),
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
        "Gradients(self._has_gradient, lying,", "Gradients(self._has_gradient, {},",
        (f"{LYING}::test_a_call_that_is_made_again_reads_what_it_read",),
    ),
    Mutant(
        "lying: those that calls change are not copied", "worker/state/gradients.py",
        "        self._changed.update(found.changed)\n", "",
        (f"{LYING}::test_a_call_that_is_made_again_reads_what_it_read",),
    ),
    Mutant(
        "lying: a replacement gets zeros", "worker/state/state.py",
        "Gradients(self._arrived[\"gradients\"], values,", "Gradients(self._arrived[\"gradients\"], {},",
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
        "way: parameters may be read and changed", "worker/replacement/changes.py",
        "if targets & self._read or read & self._written:", "if False:",
        ("tests/unit/worker/replacement/test_way.py",),
    ),
    Mutant(
        "tensors: what was replaced is written to", "worker/hidden_state/moving.py",
        "replaced = reference is not None and (begun is None or begun() is not value)", "replaced = False",
        (KEPT_TENSORS,),
    ),
    Mutant(
        "tensors: when a call is made again, another is written to", "worker/hidden_state/told.py",
        "    return before is not None and (leaf.read() is before or leaf.put(before))\n", "    return True\n",
        (KEPT_TENSORS,),
    ),
    Mutant(
        "tensors: a container that has come up has no places", "worker/hidden_state/told.py",
        "            _put(leaf, told[path], places)\n", "            pass\n", (KEPT_TENSORS,),
    ),
    Mutant(
        "tensors: rows are told as far as they were seen", "worker/hidden_state/told.py",
        "            more.update((each.path, each) for each in _row(path, leaf, container))\n", "", (KEPT_TENSORS,),
    ),
    Mutant(
        "still: what stands in a place is not asked for", "worker/hidden_state/still.py",
        "if list(map(id, map(getitem, self._thing_holders, self._thing_names))) != self._thing_ids:", "if False:",
        (STILL,),
    ),
    Mutant(
        "objects: on the way they are as they were built", "worker/replacement/taking_over.py",
        "        self._state.private.hidden.place(moving)\n", "", (f"{ORDINARY}::{OBJECTS}[position]",),
    ),
    Mutant(
        "rows: what grows is passed over", "worker/hidden_state/moving.py",
        "                    self.lacking.setdefault(path, GROWS)\n", "                    pass\n",
        (f"{ORDINARY}::test_a_row_that_grows_by_what_is_not_carried_is_refused",),
    ),
    Mutant(
        "later: parts that move are given away", "worker/replacement/tail.py",
        "        raise UndeclaredError(_LATER.format(self.names))\n\n    def end", "        return\n\n    def end",
        (f"{ORDINARY}::test_and_is_not_given_away_where_no_rank_has_it_any_more[object]",),
    ),
    Mutant(
        "later: what the script has written twice stays", "worker/replacement/tail.py",
        "        if self._changes.wrote:", "        if False:",
        (f"{ORDINARY}::test_behind_a_section_it_is_as_it_was_there[evaluated:1:0]",),
    ),
    Mutant(
        "later: forward passes are watched", "worker/replacement/tail.py",
        "if self._watched.computes(module) and self._watched.unseen():", "if False:",
        (f"{ORDINARY}::test_a_forward_pass_between_steps_computes_what_it_would_alone",),
    ),
    Mutant(
        "buffers: those of the start are taken", "worker/state/private.py",
        "if self._all and (others := self.module_buffers.refresh()):",
        "if False and (others := self.module_buffers.refresh()):",
        (f"{ORDINARY}::test_buffers_that_are_bound_anew[own]",),
    ),
    Mutant(
        "rolled back: values are those of the snapshot", "worker/replacement/taking_over.py",
        "            if told:\n", "            if False:\n",
        (f"{ORDINARY}::test_values_after_a_roll_back_are_those_of_the_place[grad:16:1]",),
    ),
    Mutant(
        "entries: a container that changes is not read again", "worker/tensors/entries.py",
        "        except RuntimeError:  # it has changed in between\n            continue\n",
        "        except ZeroDivisionError:\n            continue\n", ("tests/unit/worker/tensors/test_entries.py",),
    ),
    Mutant(
        "doers: nobody asks in each call", "worker/hidden_state/still.py",
        "self.has_stirred() or self._doers.have_changed()", "self.has_stirred()", (DOERS,),
    ),
    Mutant(
        "doers: a redo does not put them back", "worker/hidden_state/still.py",
        "        self._doers.put_back()\n", "", (DOERS,),
    ),
    Mutant(
        "doers: rows of functions are not told", "worker/hidden_state/doers.py",
        "    return bool(entries) and all(", "    return False and all(",
        (f"{BOUND_ANEW}::test_each_by_itself[added]",),
    ),
    Mutant(
        "doers: hooks do not count", "worker/hidden_state/leaves.py",
        "tuple(each for each in functions if not is_library", "tuple(each for each in () if not is_library",
        (f"{BOUND_ANEW}::test_what_has_no_name_is_refused_at_a_fault[hook]",),
    ),
    Mutant(
        "still: containers in containers are compared as one", "worker/hidden_state/still.py",
        "    return copy.deepcopy(dict(value) if", "    return copy.copy(dict(value) if",
        (DOERS,),
    ),
    Mutant(
        "around: functions of modules are not gone into", "worker/hidden_state/around.py",
        "            elif value is not graph.MISSING:\n", "            elif False:\n",
        (f"{BOUND_ANEW}::test_what_a_module_keeps_that_only_another_one_imports[between]",),
    ),
    Mutant(
        "objects: a class keeps none", "worker/hidden_state/graph.py",
        "(_is_value(value) or _is_kept_in_class(value))", "_is_value(value)",
        (f"{BOUND_ANEW}::test_what_classes_keep_and_dicts_by_all_keys_and_objects_of_torchs",),
    ),
    Mutant(
        "looks: containers of anything are copied", "worker/hidden_state/told.py",
        "        return made.tell(value, LARGEST) is not None\n", "        return True\n",
        ("tests/unit/worker/hidden_state/test_doers.py",),
    ),
    Mutant(
        "strayed: a call is made again after one that raised", "worker/step/calls.py",
        "        if self._strayed is not None:  # a", "        if False:  # a",
        (f"{BOUND_ANEW}::test_steps_that_raise_after_ranks_have_talked[grad:5:1-refused]",),
    ),
    Mutant(
        "incomplete: what is lacking is the script's own error", "worker/data/cursor.py",
        "        self.point, self.incomplete = entry.point, True\n", "        self.point = entry.point\n",
        (f"{TWO_STEPS}::test_what_cannot_stand_for_anything_is_no_error_of_the_scripts",),
    ),
    Mutant(
        "untold: nothing stands for it", "worker/hidden_state/moving.py",
        "            self._note_untold([(path,", "            list([(path,", (UNTOLD,),
    ),
    Mutant(
        "untold: a call that is made again finds what the cut one has left", "worker/hidden_state/hidden.py",
        "        for there in self._there:\n            there.put_back()\n", "", (UNTOLD,),
    ),
    Mutant(
        "untold: what came up in the last call is a cache", "worker/hidden_state/told.py",
        "        return [*self.paths, *self.young][:MOST]\n", "        return [*self.paths][:MOST]\n", (UNTOLD,),
    ),
    Mutant(
        "absent: it says of what class it is", "worker/tensors/absent.py",
        "            return Absent\n        _read(self)\n", "            return Absent\n        return Absent\n",
        ("tests/unit/worker/tensors/test_absent.py",),
    ),
    Mutant(
        "results: a backward pass ends at one that was carried", "worker/hidden_state/made.py",
        "    cast(Any, found).register_hook(_Refusing(path))\n", "", (UNTOLD,),
    ),
    Mutant(
        "objects: a list in a list is what its attributes are", "worker/hidden_state/made.py",
        "    if not _is_told_by_attributes(kind):\n", "    if False:\n", (UNTOLD,),
    ),
    Mutant(
        "rehearsal: what stands still is as it was at the last look", "worker/hidden_state/hidden.py",
        "        self._remembered = self.state.remember()\n        self._enter()\n\n    def look_entry",
        "        self._remembered = self.state.remember()\n\n    def look_entry",
        ("tests/unit/worker/hidden_state/test_still.py",),
    ),
    Mutant(
        "returned: what a cut call has put back has moved", "worker/retry/returned.py",
        "versions = self._at_entry or [", "versions = [", (RETURNED,),
    ),
    Mutant(
        "returned: buffers that were bound anew have moved", "worker/retry/returned.py",
        "if self._anew or bound is not self._bound:", "if self._anew:", (RETURNED,),
    ),
    Mutant(
        "scribe: what is missing is told when there is time", "agent/output/scribe.py",
        "        self._tell(now=True)\n        self._selector", "        self._tell()\n        self._selector",
        ("tests/unit/agent/test_outputs.py",),
    ),
)  # fmt: skip
