"""What proves a replacement, and is taken out of the worker to see whether a test notices: see `proofs`."""

from __future__ import annotations

from tests.mutants.mutant import Mutant
from tests.mutants.values_taken_out import VALUES

GIVEN, TAIL = "tests/unit/worker/replacement/test_given.py", "tests/unit/worker/replacement/test_tail.py"
PROGRAM = "tests/unit/worker/source/test_program.py"
LOADERS, STATE = "tests/unit/worker/data/test_hidden_loaders.py", "tests/unit/worker/hidden_state/test_hidden_state.py"
OTHER_ITEMS = "tests/unit/worker/data/test_loaders.py::test_a_list_that_has_other_items_is_found_out"
HOLDINGS = "tests/unit/worker/data/test_holdings.py"
VARIABLES, NAMES, PLACES = (
    "tests/unit/worker/hidden_state/test_variables.py",
    "tests/unit/worker/source/test_names.py",
    "tests/unit/worker/hidden_state/test_hidden_places.py",
)
COMPARED, ALONGSIDE = "tests/unit/worker/agreement/test_comparing_values.py", "tests/unit/worker/data/test_alongside.py"
READS_BETWEEN = "tests/jobs/test_case_reads_between.py"
LATE, FORESIGHT = "tests/jobs/test_case_late_decision.py", "tests/unit/worker/replacement/test_foresight.py"
PROOFS = (
    *VALUES,
    Mutant(
        "code: digests are not compared", "worker/source/program.py",
        "if known.get(key, digest) != digest", "if False", (PROGRAM,),
    ),
    Mutant(
        "code: a record has no digests", "worker/source/program.py",
        "for key, (digest, _) in self._loaded.items())", "for key, (digest, _) in ())", (PROGRAM,),
    ),
    Mutant(
        "code: a replacement does not look at them", "worker/step/calls.py",
        "        self._session.program.check(private.code)\n", "",
        ("tests/jobs/test_case_26_edited.py::test_code_that_could_not_be_kept_is_refused",),
    ),
    Mutant(
        "code: the disk wins over what is kept", "wire/files/kept.py",
        "            return kept\n", "            return found\n", (PROGRAM,),
    ),
    Mutant(
        "code: cached bytecode is believed", "worker/source/program.py",
        "        return self.source_to_code(program.source(fullname, path, self.get_data(path)), path)\n",
        "        return plain(self, fullname)\n", (PROGRAM,),
    ),
    Mutant(
        "given: what a recorded call is made with is not compared", "worker/replacement/given.py",
        "if not recorded or own == recorded:", "if True:", (GIVEN,),
    ),
    Mutant(
        "given: a call that is made again is not compared", "worker/replacement/given.py",
        "if now != first:", "if False:", (GIVEN,),
    ),
    Mutant(
        "given: what a step reads from outside does not count", "worker/replacement/given.py",
        "return (lambda: made() + read) if read else made", "return made", (GIVEN,),
    ),
    Mutant(
        "given: other numbers of a step are data", "worker/replacement/given.py",
        "return Doubt(tuple(entries), what)", "return NONE", (GIVEN,),
    ),
    Mutant(
        "given: what a step has bound is left", "worker/replacement/reads.py",
        "            place.put(value)\n", "            pass\n", (GIVEN,),
    ),
    Mutant(
        "reads: what is carried never counts", "worker/replacement/reads.py",
        "return found if place.between else NOTHING", "return NOTHING",
        ("tests/unit/worker/replacement/test_reads.py",),
    ),
    Mutant(
        "arguments: of a tensor only its shape counts", "worker/tensors/arguments.py",
        "                    self._hash.update(cast(Any, flat))\n", "                    pass\n",
        ("tests/unit/worker/tensors/test_arguments.py",),
    ),
    Mutant(
        "proving: a doubt proves itself", "worker/replacement/given.py",
        "if entry in other.doubts.get(function, ()) or", "if", ("tests/unit/worker/replacement/test_proving.py",),
    ),
    Mutant(
        "proving: nobody compares numbers", "worker/replacement/given.py",
        "        return _cut(other.now, entry) == _cut(one.now, entry)\n", "        return True\n",
        ("tests/unit/worker/replacement/test_proving.py",),
    ),
    Mutant(
        "proving: only the next step counts", "worker/replacement/given.py",
        "self.settled = not is_open(told) or steps >= MOST", "self.settled = True",
        ("tests/unit/worker/replacement/test_proving.py",),
    ),
    Mutant(
        "tail: what is read is not brought", "worker/replacement/tail.py",
        "        if self.reads(func, args, kwargs):\n", "        if False:\n", (TAIL,),
    ),
    Mutant(
        "tail: an optimizer's state is not brought", "worker/replacement/tail.py",
        "        bring()\n        return kept", "        return kept", (TAIL,),
    ),
    Mutant(
        "comparing: replicas that were never alike are let be", "worker/agreement/comparing.py",
        "if what in NEVER_ALIKE and (shard := _never_alike(told)):", "if what in NEVER_ALIKE and (shard := \"\"):",
        ("tests/jobs/test_case_drifts.py",),
    ),
    Mutant(
        "tail: what nobody has is given away", "worker/replacement/tail.py",
        "        self.check(func, args, kwargs)\n", "", (TAIL,),
    ),
    Mutant(
        "returned: values are told as they are now", "worker/retry/returned.py",
        "        for mark in self._marks:\n            mark.rewind()\n", "",
        ("tests/unit/worker/retry/test_returned.py",),
    ),
    Mutant(
        "comparing: a replacement that goes another way is replaced by another", "protocol/recovery/replicas.py",
        "if event.since is not None and", "if False and", ("tests/unit/protocol/test_comparing.py",),
    ),
    Mutant(
        "holdings: a loop's data is not compared", "worker/data/loops.py",
        "            self._holds.check(frame.holds)\n", "            pass\n", (OTHER_ITEMS,),
    ),
    Mutant(
        "holdings: the record of a loop has none", "worker/data/cursor.py",
        "length=length, holds=holds(), since=", "length=length, since=",
        (OTHER_ITEMS,),
    ),
    Mutant(
        "holdings: other rows are let pass", "worker/data/holdings.py",
        "            if path in own and own[path] != found", "            if False and own[path] != found", (HOLDINGS,),
    ),
    Mutant(
        "holdings: what changes is told on", "worker/data/holdings.py",
        "                del self._steady[path]\n", "                pass\n", (HOLDINGS,),
    ),
    Mutant(
        "holdings: only arrays count", "worker/data/held.py",
        "        elif isinstance(value, CONTAINERS):\n            self._seen",
        "        elif False:\n            self._seen",
        (HOLDINGS,),
    ),
    Mutant(
        "holdings: each loop has its own first look", "worker/data/holdings.py",
        "            names[part.name] = None\n            return False\n", "            return True\n", (HOLDINGS,),
    ),
    Mutant(
        "holdings: functions are not looked at", "worker/data/held.py",
        "    for frame in variables.outside():\n", "    for frame in ():\n", (HOLDINGS,),
    ),
    Mutant(
        "holdings: own loops have none", "worker/bootstrap/run.py",
        "                used.check(turn.holds)\n", "",
        ("tests/jobs/test_silent.py::test_nothing_wrong_comes_of_it_silently[own-tokens-by-time-kill]",),
    ),
    Mutant(
        "hidden: marks of loops are not put back", "worker/data/loaders.py",
        "            self.hidden.put(found.hidden)\n        return found\n",
        "            pass\n        return found\n", (LOADERS,),
    ),
    Mutant(
        "hidden: marks of other iterables are not put back", "worker/data/loaders.py",
        "            self.hidden.put(found.hidden)\n\n", "            pass\n\n", (LOADERS,),
    ),
    Mutant(
        "hidden: what has moved is not put back before an item", "worker/data/loops.py",
        "            self._source.hidden.put(frame.moved)\n", "            pass\n", (LOADERS,),
    ),
    Mutant(
        "hidden: a large order of data is let pass", "worker/hidden_state/moving.py",
        "                self._too_large(path, size)\n", "                pass\n", (LOADERS,),
    ),
    Mutant(
        "hidden: a second loader is let pass", "worker/data/beside.py",
        "            if frame.count > count:\n", "            if False:\n", (LOADERS,),
    ),
    Mutant(
        "hidden: an item is not compared", "worker/data/loops.py",
        "        if frame.item and arguments.digest(taken[0]) != frame.item:\n", "        if False:\n",
        ("tests/unit/worker/data/test_loaders.py",),
    ),
    Mutant(
        "hidden: modules and step functions are not told of", "worker/hidden_state/hidden.py",
        "        self.state.put(told.state)\n", "", (STATE,),
    ),
    Mutant(
        "hidden: a call that is redone goes on with its counters", "worker/retry/redo.py",
        "            self._hidden.rewind()\n", "            pass\n", (STATE,),
    ),
    Mutant(
        "hidden: what the update changes is not borrowed", "worker/hidden_state/hidden.py",
        "        self.late_paths |= dict.fromkeys(self.state.put(lent))\n", "",
        ("tests/unit/worker/state/test_lent.py",),
    ),
    Mutant(
        "looks: none at the entry of a call", "worker/retry/redo.py",
        "        self._hidden.look_entry()\n", "", (STATE,),
    ),
    Mutant(
        "looks: none at a gate", "worker/retry/redo.py",
        "        self._learn(changed)\n        self._hidden.look_gate()\n", "        self._learn(changed)\n", (STATE,),
    ),
    Mutant(
        "looks: what begins to move late is not looked for", "worker/retry/redo.py",
        "            self._hidden.look_entry(only_if_stirred=True)\n", "", (PLACES,),
    ),
    Mutant(
        "looks: none when a call has returned", "worker/hidden_state/hidden.py",
        "        if self._looking or self._has_changed():\n            self._note",
        "        if False:\n            self._note",
        ("tests/unit/worker/state/test_lent.py",),
    ),
    Mutant(
        "looks: what changes on both sides of a gate is not looked for", "worker/hidden_state/hidden.py",
        "        if self._at_gate is not None and self._at_gate != (now := self.now()):\n",
        '        if False:\n            now = b""\n', ("tests/unit/worker/hidden_state/test_late.py",),
    ),
    Mutant(
        "looks: a tensor that begins to change in a cut step is left as it is", "worker/hidden_state/still.py",
        "    return copied is not None and memory.fill(thing, copied)\n", "    return True\n",
        ("tests/unit/worker/hidden_state/test_late.py",),
    ),
    Mutant(
        "looks: gradients of tensors trained by hand stay as a cut step has left them", "worker/hidden_state/hidden.py",
        "        self._by_hand.rewind()\n", "", ("tests/unit/worker/hidden_state/test_by_hand.py",),
    ),
    Mutant(
        "looks: what other processes write is put back over it", "worker/hidden_state/still.py",
        "(not raw_memory.is_shared(thing) and raw_memory.fill(thing, glance))", "raw_memory.fill(thing, glance)",
        ("tests/unit/worker/hidden_state/test_late.py",),
    ),
    Mutant(
        "looks: any queue of what a thread has is drained", "worker/tensors/entries.py",
        "any(each is waiting and name in names for", "any(each is waiting for",
        ("tests/unit/worker/tensors/test_entries.py",),
    ),
    Mutant(
        "looks: records do not tell of it", "worker/state/private.py",
        "self._names, buffers, self.hidden.record(), own", 'self._names, buffers, b"", own', (STATE,),
    ),
    Mutant(
        "looks: none at objects in extra", "worker/state/state.py",
        "return Hidden([*self.modules(), *others],", "return Hidden([*self.modules()],", (STATE,),
    ),
    Mutant(
        "looks: samplers have no mark", "worker/hidden_state/hidden.py",
        "        return _together(told)\n", '        return b""\n', (LOADERS,),
    ),
    Mutant(
        "looks: items have no mark", "worker/hidden_state/hidden.py",
        '        return _together(moved) if moved else b""\n', '        return b""\n', (LOADERS,),
    ),
    Mutant(
        "looks: loaders between their loops are forgotten", "worker/hidden_state/hidden.py",
        "                resting.append((one.name, one.moving.record()))\n", "", (LOADERS,),
    ),
    Mutant(
        "looks: a call that goes through a loader is not undone", "worker/data/loops.py",
        "            self._source.hidden.within_call()\n", "            pass\n", (LOADERS,),
    ),
    Mutant(
        "kept: what cannot be told is not named", "worker/hidden_state/variables.py",
        "            (one.histories if name in names.filled else one.lacking).append(name)\n", "            pass\n",
        (VARIABLES,),
    ),
    Mutant(
        "kept: what is named is not refused", "worker/hidden_state/variables.py",
        "        if one.lacking:\n", "        if False:\n", (VARIABLES,),
    ),
    Mutant(
        "kept: enumerations are not told", "worker/hidden_state/made.py",
        "issubclass(kind, enum.Enum) or kind in DICTS or", "kind in DICTS or", (VARIABLES,),
    ),
    Mutant(
        "kept: named tuples are not told", "worker/hidden_state/made.py",
        "or _is_named_tuple(kind) or", "or", (VARIABLES,),
    ),
    Mutant(
        "kept: dicts of other classes are not put back", "worker/hidden_state/made.py",
        "        return _filled(kind, inner, live)\n", "        return MISSING\n", (VARIABLES,),
    ),
    Mutant(
        "kept: what inner functions assign is not seen", "worker/source/names.py",
        "frozenset(assigned | (within & set(code.co_cellvars)))", "frozenset(assigned)", (NAMES, VARIABLES),
    ),
    Mutant(
        "kept: flags of a process's own are carried", "worker/source/names.py",
        "if _is_set_up(name, instructions))", "if False)", (NAMES, VARIABLES),
    ),
    Mutant(
        "kept: attributes that come up later are not", "worker/hidden_state/moving.py",
        "if holder is not None and name.isidentifier() else None", "if False else None", (STATE,),
    ),
    Mutant(
        "kept: what threads keep is not looked at", "worker/hidden_state/leaves.py",
        "threading.local if issubclass(type(value), threading.local) else object", "object", (STATE,),
    ),
    Mutant(
        "kept: the environment is not looked at", "worker/hidden_state/variables.py",
        "    yield from leaves.of_environment()\n", "", (STATE,),
    ),
    Mutant(
        "kept: functions of one name are taken for one", "worker/hidden_state/around.py",
        "        made[one.__qualname__] += 1\n", "", (PLACES,),
    ),
    Mutant(
        "kept: results of cached functions are not looked at", "worker/hidden_state/around.py",
        "found = [*filter(graph.is_generator, held), *filled]", "found: list[Any] = []", (PLACES,),
    ),
    Mutant(
        "kept: iterators that steps go on with are let pass", "worker/hidden_state/signatures.py",
        "    if kind in graph.ITERATORS or kind is itertools.cycle:\n", "    if False:\n", (PLACES,),
    ),
    Mutant(
        "kept: large state that changes in place is put up with", "worker/hidden_state/moving.py",
        "            self.lacking[path] = LARGE\n", "            pass\n", (PLACES,),
    ),
    Mutant(
        "kept: large state is put up with by those that live", "worker/hidden_state/hidden.py",
        "        absent.refuse_lacking(self.state.lacking, when=(absent.LARGE, absent.LIBRARY))\n", "",
        (PLACES,),
    ),
    Mutant(
        "kept: large state is put up with by a replacement", "worker/hidden_state/hidden.py",
        "        absent.refuse_lacking(told.lacking)\n", "", (PLACES,),
    ),
    Mutant(
        "collected: what collects is entered in the middle", "worker/data/loops.py",
        "                if frame.count > 1 and collects_items(sys._getframe(1)):\n", "                if False:\n",
        (ALONGSIDE,),
    ),
    Mutant(
        "collected: comprehensions are let pass", "worker/source/names.py",
        "        return _appends(instructions, instructions[here])\n", "        return False\n", (NAMES,),
    ),
    Mutant(
        "collected: map() is let pass", "worker/source/names.py",
        "    return expression or not _is_next(instructions, here)\n", "    return expression\n", (NAMES,),
    ),
    Mutant(
        "comparing: sections are not compared", "worker/agreement/comparing.py",
        "            return bool(every) and pending.section == 1", "            return False and pending.section == 1",
        (COMPARED,),
    ),
    Mutant(
        "tail: what the script has changed is overwritten when the state comes",
        "worker/replacement/taking_over.py", 'ours = returned.now(self._state, tensors=True) if self._values else b""',
        "ours = self._values", (READS_BETWEEN,),
    ),
    Mutant(
        "tail: modes of modules are those of another rank", "worker/retry/returned.py",
        "        return Flags(part.module)\n", "        return None\n", (READS_BETWEEN,),
    ),
    Mutant(
        "tail: modes of modules do not count", "worker/retry/returned.py",
        "_Told = ContainerPart | ModulePart |", "_Told = ContainerPart |", (READS_BETWEEN,),
    ),
    Mutant(
        "foresight: a result by chance counts", "worker/replacement/foresight.py",
        "(found is not _NOWHERE and not _equal(found, value))", "False", (FORESIGHT,),
    ),
    Mutant(
        "foresight: a return is not compared with what was foreseen", "worker/replacement/foresight.py",
        "            self._forget_wrong(told, leaves)\n", "            pass\n", (FORESIGHT,),
    ),
    Mutant(
        "foresight: one other rank is enough", "worker/replacement/foresight.py",
        "alike = len(found) > 1 and all", "alike = all", (FORESIGHT,),
    ),
    Mutant(
        "foresight: nothing is told", "worker/step/calls.py",
        "attempt.foresight.at_gate(_CODE) if result is None", 'b"" if result is None',
        ("tests/jobs/test_case_returned.py",),
    ),
    Mutant(
        "still: what begins to move is not put back", "worker/hidden_state/hidden.py",
        "        self._still.rewind()\n", "", ("tests/jobs/test_case_kept.py", "-k", "first_to_count"),
    ),
    Mutant(
        "still: it is in the record only after a look", "worker/hidden_state/hidden.py",
        "if self._looking or self.state.still.has_stirred() or ", "if self._looking or ",
        ("tests/jobs/test_case_kept.py", "-k", "first_time"),
    ),
    Mutant(
        "comparing: nothing is told at the end", "worker/step/calls.py",
        "return self._comparison.at_the_end(self._safepoint.renewed_after)", 'return ""',
        (f"{LATE}::test_it_is_found_without_a_section_at_the_end",),
    ),
    Mutant(
        "comparing: what is told at the end is not compared", "protocol/recovery/recovery.py",
        "if wrong := differing_at_the_end(job.seats.items()):", 'if wrong := "":',
        ("tests/unit/protocol/test_comparing.py",),
    ),
    Mutant(
        "comparing: what a script does after its last step is taken for training", "worker/agreement/comparing.py",
        " or self._left != self._places()", "",
        (f"{LATE}::test_what_a_rank_does_to_its_model_after_the_last_step_is_its_own",),
    ),
    Mutant(
        "comparing: settings that differ late are let pass", "worker/agreement/comparing.py",
        "        if differs and (what != VALUES or", "        if differs and (what == TENSORS or", (COMPARED,),
    ),
)  # fmt: skip
