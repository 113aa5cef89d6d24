"""Equivalent mutants: changes that change nothing which matters, each with its reason. Nothing else may survive.

A line whose mutant is killed, or is not made any more, fails too.
"""

from __future__ import annotations

# Reasons that several have.
NOBODY = "nobody is named None; it is said for the types"
OUTGOING = "who ends an outgoing takes it off the seat as well"
STANDS = "an outgoing is kept only while the job goes on from the boundary: else `decide` lets it go"
TARGET = (
    "a target that is not being ended has an open move, and is its rank's incoming worker; it is said for the types"
)
FAST = "the same, and slower"
UNREAD = "it would be noted, and is not looked at then"
TOLD_OF = "what each has begun in the default group is always told"
LAST_HEARD = "nobody was heard later than who was heard last, which was asked just before"
HOLDS_RANK = "who holds a rank of the job is of the job, and has that rank"
HELD = "all ranks are held in this phase: a loss ends it"

EQUIVALENT: dict[str, str] = {
    "boundary:begin_quiesce: replace without boundary=None": "while a job trains there is none: who goes on forgets it",
    (
        "boundary:told_where: job.boundary is not None and seat.ready and (seat.record_of(job.bou... wit"
        "hout job.boundary is not None"
    ): "there is no record of None; it is said for the types",
    "boundary:begin_generation: seats.count(facts.has_answered) > FEW by GtE": FAST,
    "boundary:begin_generation: without if seats.count(facts.has_answered) > FEW": FAST,
    "boundary:trains: always replace(seat, distrusted=frozenset())": FAST,
    (
        "boundary:cut_over: job.resume_point is None or boundary is None or boundary > job.resu... without "
        "boundary is None"
    ): "there is one, after which all stand; it is said for the types",
    (
        "boundary:give_back: outgoing is None or outgoing.life is Life.FENCING or job.resume_poi... without "
        "job.resume_point != job.boundary"
    ): STANDS,
    (
        "boundary:give_back: outgoing is None or outgoing.life is Life.FENCING or job.resume_poi... without "
        "outgoing.life is Life.FENCING"
    ): OUTGOING,
    "boundary:give_back: always cluster.workers.get(seat.outgoing)": NOBODY,
    "boundary:finish_move: replace without targets=Table()": "the cutover has made it empty",
    "cluster:worker_raised: without if move is None": TARGET,
    "cluster:module: 22 to 45": "any number would do that no earlier rules have",
    "cluster:worker_started: node is not None and (not node.proven) without node is not None": (
        "a worker's node is known; it is said for the types"
    ),
    "cluster:worker_started: node is not None and (not node.proven) without not node.proven": FAST,
    "cluster:judge_deaths: found is None or both is None without found is None": (
        "without a job there are no two deaths of it; it is said for the types"
    ),
    (
        "cluster:worker_raised: seat is not None and seat.replacement and (not seat.resumed) and (j... without "
        "job.phase in RECOVERING"
    ): "elsewhere nobody is a replacement",
    (
        "job:Job.is_held_by: rank is not None and rank in self.seats and (self.seats[rank].worke... without "
        "rank is not None"
    ): "None is no rank; it is said for the types",
    "job:Job.went_on: self.resume_point or START without START": (
        "who goes on after an incident goes on from a point; it is said for the types"
    ),
    "incident:Incident: 0 to 1 #3": "it is read only of what went on, and set with it",
    ("answers:stood_at_boundary: event.private and event.point is not None without event.point is not None"): (
        "it is the boundary, which was asked just before; it is said for the types"
    ),
    (
        "answers:record_kept: job is None or seat is None or ward is None or (event.worker not in... wit"
        "hout job is None"
    ): "without a job there is no seat; it is said for the types",
    "answers:is_repeated: given is None or not isinstance(event, ev.Answer) without not isinstance(event, ev.Answer)": (
        "whatever is in that table is an answer; it is said for the types"
    ),
    "answers:is_repeated: job is None or seat is None or seat.worker != event.worker without job is None": (
        "without a job there is no seat; it is said for the types"
    ),
    (
        "answers:is_repeated: isinstance(event, ev.WorkerResumed) and job.phase is JobPhase.RUNNING without "
        "isinstance(event, ev.WorkerResumed)"
    ): "while a job trains nobody is asked, and no answer of that table counts",
    "standing:StandingOrders.of_node: for all, not if worker.rank is not None": NOBODY,
    "cluster:module: 10000 to 20001": "a bound that no sound core comes near",
    "ending:spend_targets: move is None or job.phase is not JobPhase.HALTING without move is None": (
        "a move has asked for the boundary; it is said for the types"
    ),
    "incident:Incident.receive: zip without strict=False": "it is so anyway, and said for the reader",
    "parts:Rollback: 1 to 3": "whoever joins and takes snapshots says it",
    "parts:Rollback: 0 to 1 #2": "to go back for the first time is to go back from beyond the start",
    "parts:Exceptions: 0 to 1": "it is read only of what is broken, and set with it",
    "migration:worker_prepared: without if move is None": TARGET,
    "migration:wishes_to_move: always cluster.workers.get(seat.worker)": NOBODY,
    ("migration:homesick: not job.spec.return_home or home is None or worker.node == home without home is None"): (
        "who holds a rank has a home, and no node is named None; it is said for the types"
    ),
    (
        "migration:homesick: node is None or not node.alive or any((taint.node == home for taint... with"
        "out node is None"
    ): ("a node that was there stays known; it is said for the types"),
    "migration:able_spares: for all, not if cluster.nodes[spare.node].alive": (
        "what ran on a lost node is forgotten with it"
    ),
    ("migration:fit: to is not None and named.get(to, 0) >= room_for(cluster, job, to) without to is not None"): (
        "nobody is counted under None, and where there is no room at all it was said before"
    ),
    "migration:choose_group: urgent and chosen is None without chosen is None": (
        "where there is room for a plan there is room for what is urgent"
    ),
    (
        "migration:prepare_targets: len(ready) < len(move.ranks) or not all(ready) or cluster.now_ms < ."
        ".. without len(ready) < len(move.ranks)"
    ): ("`place_workers`, which comes before, starts a worker for each rank for which there is room"),
    "migration:narrow: target is not None and target in cluster.workers without target is not None": NOBODY,
    (
        "migration:narrow: target is not None and target in cluster.workers without target in cluster.workers"
    ): "to end who is gone changes nothing",
    "migration:abandon: without job = cluster.jobs[job.spec.job]": "it was put there as it is",
    "parking:too_slow: event.grace_ms or 0 without 0": "what has no time to fit into fits; it is said for the types",
    "parking:progress_parking: always job.with_parking(why_not=why)": FAST,
    (
        "parking:of_our_own_accord: not cluster.taints or job.phase not in TRAINING or job.stop is not ... without "
        "not cluster.taints"
    ): FAST,
    "parking:told_to_end: without if not any((key == TOLD for _, _, key in cluster.taints))": FAST,
    "parking:when_gone: always cluster.workers.get(seat.worker)": NOBODY,
    "parking:when_gone: without if worker is None": HELD,
    "requests:move_asked: 1 to 3": "groups have to differ, and they do",
    "recovery:outgoing_workers_of: always those": STANDS,
    "recovery:outgoing_workers_of: always cluster.workers.get(name)": NOBODY,
    (
        "recovery:outgoing_workers_of: outgoing is None or outgoing.life is Life.FENCING or mistrusted o"
        "r ... without outgoing.life is Life.FENCING"
    ): OUTGOING,
    "records:circle_of: for all, not if worker is not None": HELD,
    "records:note_keepers: for all, not if name is not None": HELD,
    "records:buddies_to_ask: for all, not if keeper[1].worker not in seat.asked_buddies": (
        "who denies a snapshot is not counted among its keepers any more"
    ),
    ("records:buddies_to_ask: name is not None and name not in seat.asked_buddies without name is not None"): NOBODY,
    (
        "records:ask_others: job.rollback.point is not None or seat.record_of(job.resume_point) ... with"
        "out job.rollback.point is not None"
    ): UNREAD,
    (
        "records:ask_others: job.rollback.point is not None or seat.record_of(job.resume_point) ... with"
        "out seat.record_of(job.resume_point) is not None"
    ): UNREAD,
    "records:ask_others: without if job.rollback.point is not None or seat.record_of(job.resume_point) ...": UNREAD,
    (
        "records:still_there: worker is None or worker.rank is None or worker.life is Life.FENCING witho"
        "ut worker.life is Life.FENCING"
    ): ("who ends a holder or an outgoing takes it off the seat as well"),
    (
        "records:still_there: worker is None or worker.rank is None or worker.life is Life.FENCING witho"
        "ut worker.rank is None"
    ): ("who was sent a record holds a rank until it ends; it is said for the types"),
    "records:still_there: seat.worker == name and seat.holds is not None without seat.worker == name": (
        "who has lost its rank is being ended"
    ),
    "roster:Seat: 0 to 1 #3": ("looked at only of a rank whose holder has ended, which dates it"),
    "roster:Seat: 0 to 1": ("compared with the generation of an interruption only, which is 2 at least"),
    (
        "speech:target_orders: worker is None or worker.life not in UP or worker.incoming_for != rank wi"
        "thout worker is None"
    ): ("a target that is gone is taken off its move at once; it is said for the types"),
    (
        "speech:target_orders: worker is None or worker.life not in UP or worker.incoming_for != rank wi"
        "thout worker.incoming_for != rank"
    ): TARGET,
    (
        "speech:outgoing_orders: job.phase not in (JobPhase.PREPARING, JobPhase.RECONFIGURING) or jo... "
        "without job.resume_point is None"
    ): ("before there is a target nobody has left; it is said for the types"),
    (
        "speech:outgoing_orders: job.phase not in (JobPhase.PREPARING, JobPhase.RECONFIGURING) or jo... "
        "without job.resume_point != job.boundary"
    ): STANDS,
    "speech:outgoing_orders: always cluster.workers.get(seat.outgoing)": NOBODY,
    (
        "speech:outgoing_orders: outgoing is not None and outgoing.life is not Life.FENCING without outg"
        "oing.life is not Life.FENCING"
    ): OUTGOING,
    (
        "speech:recall_orders: job.phase is not JobPhase.PREPARING or job.resume_point is None "
        "without job.resume_point is None"
    ): ("a target is decided before anybody prepares for it; it is said for the types"),
    (
        "speech:say_decide: job.open_move is not None and rank in job.open_move.targets without "
        "job.open_move is not None"
    ): ("a move has asked for the boundary; it is said for the types"),
    "speech:rank_orders: always cluster.workers.get(seat.worker)": NOBODY,
    "taints:taint_set: without if taint == before": "it puts there what is there, and no fault follows from it",
    "silent_nodes:SilentNodes.of: 0 to 1": "no limit is as short as that",
    "silent_nodes:SilentNodes._last_proof: for all, not if other != node": (
        "its own ranks pass gates in its own beats, which are no later than the last"
    ),
    "silent_nodes:gates_of: always cluster.workers.get(seat.worker)": NOBODY,
    "silent_nodes:gates_of: 2 to 5": "one of two is on another node; more are only slower",
    "stalls:Stalled.among: group == DEFAULT or group in self.begun without group == DEFAULT": TOLD_OF,
    "stalls:Stalled.meets: 0 to 1": TOLD_OF,
    "stalls:ended_early: 1 to 3": "all that have ended have committed the same last point",
    "failure_detector:Company.ranks: for all, not if seat.worker is not None": NOBODY,
    "failure_detector:judge: still and job.phase is JobPhase.RUNNING without still": FAST,
    (
        "failure_detector:judge_worker: limit is None or seen_ms - pulse.still_ms < limit without "
        "seen_ms - pulse.still_ms < limit"
    ): FAST,
    "failure_detector:judge_worker: seen_ms - pulse.still_ms by Add": FAST,
    "deafness:Deafness.look: 0 to 1 #3": "before the first look it has all of its time",
    "deafness:all_silent: without if now_ms - failure_detector.last_heard_ms(now_ms) < limit": FAST,
    "deafness:all_silent: now_ms - failure_detector.last_heard_ms(now_ms) by Add": FAST,
    "deafness:all_silent: since is not None and now_ms - since >= limit without now_ms - since >= limit": LAST_HEARD,
    "deafness:all_silent: now_ms - since by Add": LAST_HEARD,
    "failure_detector:proof: for all, not if worker is not None": NOBODY,
    "failure_detector:proof: job.resume_point or START without START": (
        "what is to be proved went on from a point; it is said for the types"
    ),
    "failure_detector:judge_ways: 0 to 1": "without samples there are no ways",
    "rollback:note_kept: kept is None or known is None or (not known.alive) without known is None": (
        "a worker's node is known; it is said for the types"
    ),
    "rollback:note_kept: kept is None or known is None or (not known.alive) without not known.alive": (
        "with its node a worker is forgotten: nobody tells of one that is lost"
    ),
    "rollback:not_there: always job.with_rollback(kept=job.rollback.kept.put(node, left))": (
        "to keep nothing there says as much as to know of nothing"
    ),
    "moves:Move: False to True": "it is read only of a move under way, and set with its ranks",
    "phases:asked: always phase.holders + phase.replacements": (
        "what is said to replacements looks itself for whom it is"
    ),
    ("placing:empty_slots: without if cluster.workers.size(facts.node_of, node.node) >= node.slots and (n..."): FAST,
    "placing:empty_slots: cluster.workers.size(facts.node_of, node.node) >= node.slots by Gt": FAST,
    "placing:fill_slots: without if missing <= 0 and job.open_move is None and (not all_vacant(job))": FAST,
    "placing:fill_slots: missing <= 0 by Lt": FAST,
    "rollback:holders_on: for all, not if worker.job == job.spec.job and worker.rank is not None": HOLDS_RANK,
    (
        "rollback:holders_on: worker.job == job.spec.job and worker.rank is not None without worker.job == job.spec.job"
    ): HOLDS_RANK,
    (
        "rollback:holders_on: worker.job == job.spec.job and worker.rank is not None without worker.rank is not None"
    ): HOLDS_RANK,
    "rollback:holders_on: sorted without key=itemgetter(0)": "no rank is held twice",
    "placing:invite: without if not may_share(job)": FAST,
    "placing:invite: move is not None and r not in move.targets and (r not in vacant) without move is not None": (
        "without a move no rank leaves; it is said for the types"
    ),
    "job:Job.prove: without if not self.accounting.unproved": FAST,
    "job:Job.prove: 1 to 3 #2": "it is left before, when as many are found as there are",
    "stopping:leave: always event.code": "what was ended by a signal has no code",
    "silence:Rhythm.note: gap_ms <= self.gap_ms by Lt": "an equal gap in the place of the other is the same rhythm",
    "pulses:Pulse: 0 to 1 #2": "`feel` says it of each",
    "pulses:feel: replace without advanced_ms=advanced_ms": "who has advanced is at another place",
    "pulses:FailureDetector.last_heard_ms: always max(self.heard.values(), default=now_ms)": "it is noted for speed",
    "pulses:end_deafness: without if gap < LEAST_SILENCE_MS": FAST,
    "pulses:end_deafness: min without default=LEAST_SILENCE_MS": "who was heard has a rhythm",
    "pulses:end_deafness: replace without newest_ms=now_ms": "it is noted when the beat is taken in",
    "pulses:forget: always replace(failure_detector, pulses=pulses)": FAST,
    "table:module: 128 to 257": FAST,
    "table:module: 64 to 129": FAST,
    "table:Table.__init__: len(found) > SMALL by GtE": FAST,
    "table:Table.__iter__: always (key for key, _ in self.pairs())": FAST,
    "table:Table.pairs: zip without strict=False": "that is what zip does",
    "table:Table.pairs: always ((key, value) for key, value in both if value is not NOTHING)": FAST,
    "table:Table.items: always _Items(self)": FAST,
    "table:Table.values: always _Values(self)": FAST,
    "table:Table.__eq__: without if self._items is not None and other._items is not None": FAST,
    "table:Table.__eq__: without if len(self) != len(other)": FAST,
    "table:Table.__eq__: without if shared and self._used == other._used": FAST,
    "wait_for_graph:module: 0 to 1": "any key would do that no group has",
    "candidate:hear_answer: without if before is None": FAST,
    "candidate:hear_answer: without if before == ballot": FAST,
    ("candidate:judge: without if not any((is_majority(candidacy.promises, group) for group in newest..."): FAST,
    (
        "door:learn_from: noted.order == known.order and noted.base is None and (known.base i... without "
        "noted.base is None"
    ): FAST,
    (
        "door:learn_from: noted.order == known.order and noted.base is None and (known.base i... without "
        "known.base is not None"
    ): FAST,
}
