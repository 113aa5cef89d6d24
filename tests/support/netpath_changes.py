"""What is changed in mutants of the network protocol, and which changes change nothing that matters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """A text of the protocol (proto.c, silence.c) that is there once, and what is put in its place."""

    name: str
    old: str
    new: str


def without(name: str, old: str) -> Change:
    """The text is left out."""
    return Change(name, old, "")


CHANGES = [
    # ------------------------------------------------ chunks and requests
    Change("chunks are rounded down", "f->limits.chunk - 1) / f->limits.chunk", "f->limits.chunk) / f->limits.chunk"),
    Change("an empty message has no chunk", "size == 0 ? 1 :", "size == 0 ? 0 :"),
    Change(
        "a slot is open whatever its number", "slot->state == SLOT_OPEN && slot->seq == seq", "slot->state == SLOT_OPEN"
    ),
    Change("a slot is open whatever its state", "slot->state == SLOT_OPEN && slot->seq == seq", "slot->seq == seq"),
    Change("a slot is taken that is not free", "if (slot->state != SLOT_FREE || size", "if (size"),
    Change("no bound for messages", "slot->state != SLOT_FREE || size > longest(f)", "slot->state != SLOT_FREE"),
    without("chunks of the slot's last message are kept", "  memset(slot->have, 0, used);\n"),
    without("chunks given of the slot's last message are kept", "  memset(slot->given, 0, used);\n"),
    Change("the slot's place is kept", "  slot->next = slot->first_time = 0;", "  slot->first_time = 0;"),
    without("the slot's size is kept as begun", "  slot->begun = 0;\n"),
    Change("posts after a failure are open", "f->failed || too_late(f, slot->seq) ?", "too_late(f, slot->seq) ?"),
    Change("posts after the peer has closed are open", "f->failed || too_late(f, slot->seq) ?", "f->failed ?"),
    Change("a closed receiver's count is passed", "seq >= f->peer_end)", "seq > f->peer_end)"),
    Change("all sends fail with a BYE", "(!f->sends || seq >= f->peer_end)", "1"),
    Change("posts are not told of", "for (int i = 0; i < f->paths; i++) f->path[i].cts_due = 1;", ";"),
    Change(
        "posts are told of over the first path only",
        "for (int i = 0; i < f->paths; i++) f->path[i].cts_due = 1;",
        "f->path[0].cts_due = 1;",
    ),
    Change(
        "failing ends nothing", "if (slot) slot->state = SLOT_FAILED;\n  }\n  f->tail", "(void)slot;\n  }\n  f->tail"
    ),
    Change("closing drops nothing", "f->slot[i].state = SLOT_FREE;\n  f->tail", ";\n  f->tail"),
    Change(
        "closing is said over the first path only",
        "i < f->paths; i++) f->path[i].bye_due = 1;\n}\n\nint",
        "i < 1; i++) f->path[i].bye_due = 1;\n}\n\nint",
    ),
    # ------------------------------------------------ the end
    Change("a sender goes at once", "if (f->sends) return f->peer_knows;", "if (f->sends) return 1;"),
    Change(
        "a sender goes when the peer has closed",
        "if (f->sends) return f->peer_knows;",
        "if (f->sends) return f->peer_closed;",
    ),
    without(
        "a receiver goes before its sender",
        "  if (!f->peer_closed) return 0;      // the sender may still ask for an ACK that was lost with its path\n",
    ),
    Change("a receiver goes without a word", "if (f->path[i].live && !f->path[i].bye_due) return 1;", "return 1;"),
    Change("a BYE does not say that the other's was heard", "out->offset = f->peer_closed;", "out->offset = 0;"),
    Change("a BYE always says that the other's was heard", "out->offset = f->peer_closed;", "out->offset = 1;"),
    without(
        "a BYE is not answered",
        "  for (int i = 0; i < f->paths && !f->sends; i++) f->path[i].bye_due = 1; // whoever has said it may go\n",
    ),
    Change(
        "a BYE that was lost with its path is not said again",
        "p->bye_due = f->closing || (!f->sends && f->peer_closed);",
        "p->bye_due = 0;",
    ),
    Change(
        "an answer to a BYE that was lost is not said again",
        "f->closing || (!f->sends && f->peer_closed);",
        "f->closing;",
    ),
    Change("receives go on after a BYE", "if (slot && too_late(f, each)) slot->state = SLOT_FAILED;", "(void)slot;"),
    # ------------------------------------------------ paths
    Change("a lost path keeps its chunks", " // else it ends in peace\n  let_others_take(f, p);", ""),
    Change(
        "a path that ends with the peer is lost",
        "if (!f->peer_closed && !f->closing) p->downs++;",
        "if (!f->closing) p->downs++;",
    ),
    Change(
        "a path that ends with us is lost",
        "if (!f->peer_closed && !f->closing) p->downs++;",
        "if (!f->peer_closed) p->downs++;",
    ),
    Change(
        "others take what was acknowledged, too",
        "if (!slot || in(slot->have, (int)index)) continue;\n    drop",
        "if (!slot) continue;\n    drop",
    ),
    without("a chunk that is free again is passed over", "    if (index < slot->next) slot->next = index;\n"),
    Change("a chunk that is free again is not marked so", "    drop(slot->given, (int)index);\n", ""),
    Change(
        "the oldest chunk of a lost path is forgotten",
        "(p->hedged - p->acknowledged) : 0; i",
        "(p->hedged - p->acknowledged) : 1; i",
    ),
    Change(
        "the last chunk of a lost path is forgotten",
        "i < p->count; i++) {\n    flow_chunk *chunk",
        "i + 1 < p->count; i++) {\n    flow_chunk *chunk",
    ),
    Change("what was hedged is not counted", "p->hedged = p->acknowledged + p->count;", ";"),
    Change(
        "more counts as hedged than was",
        "p->hedged = p->acknowledged + p->count;",
        "p->hedged = p->acknowledged + p->count + 1;",
    ),
    Change(
        "acknowledged chunks do not count as hedged", "p->hedged = p->acknowledged + p->count;", "p->hedged = p->count;"
    ),
    Change("a lost path keeps its count", "  p->count = p->unacknowledged = 0;\n  for", "  for"),
    Change("the peer is not told of a loss", "    f->path[i].downs_due |= (uint8_t)(1u << path);\n", ""),
    Change(
        "the peer is told of a loss with a wrong epoch",
        "f->path[i].lost_epoch[path] = p->epoch;\n    f->",
        "f->path[i].lost_epoch[path] = (uint16_t)(p->epoch + 1);\n    f->",
    ),
    without(
        "a new connection does not end the old",
        "  flow_down(f, path, now); // what an older connection carried has to go another way\n",
    ),
    Change(
        "a new connection is suspect as the old",
        "p->suspect = p->silent = p->slow = 0;\n  p->deaf_us",
        "p->silent = p->slow = 0;\n  p->deaf_us",
    ),
    Change(
        "a new connection is silent as the old",
        "p->suspect = p->silent = p->slow = 0;\n  p->deaf_us",
        "p->suspect = p->slow = 0;\n  p->deaf_us",
    ),
    Change(
        "a new connection is slow as the old",
        "p->suspect = p->silent = p->slow = 0;\n  p->deaf_us",
        "p->suspect = p->silent = 0;\n  p->deaf_us",
    ),
    Change("a new connection is deaf as the old", "  p->deaf_us = 0;\n  p->hedged", "  p->hedged"),
    Change("what was hedged is kept for a new connection", "  p->hedged = 0;\n", ""),
    without("the epoch is kept", "  p->epoch = epoch;\n"),
    Change("a new connection was heard of long ago", "p->heard_us = p->sent_us = now;", "p->sent_us = now;"),
    Change("acknowledged chunks are counted on", "p->acknowledged = p->arrived = 0;", "p->arrived = 0;"),
    Change("chunks that arrived are counted on", "p->acknowledged = p->arrived = 0;", "p->acknowledged = 0;"),
    Change(
        "an acknowledgement is owed to a new connection",
        "p->ack_due = p->ping_due = p->pong_due = 0;",
        "p->ping_due = p->pong_due = 0;",
    ),
    Change("a new connection is not told of posts", "p->cts_due = !f->sends;\n  p->bye_due", "p->bye_due"),
    Change(
        "giving up counts from before a connection",
        "  f->cut_us = 0;\n  f->unreachable = 0;\n  if (!f->ticked_us)",
        "  if (!f->ticked_us)",
    ),
    # ------------------------------------------------ sending
    Change(
        "one chunk over the window",
        "p->unacknowledged + f->limits.chunk <= p->window",
        "p->unacknowledged <= p->window",
    ),
    Change("no window", "p->unacknowledged + f->limits.chunk <= p->window", "1"),
    Change("nothing goes if the window is less than a chunk", "  if (p->count == 0) return 1;\n", ""),
    without("the window is what it was", "    learn_window(f, p, &chunk, now);\n"),
    without("the window grows over its limit", "  if (fits > f->limits.window) fits = f->limits.window;\n"),
    without("the window shrinks to nothing", "  if (p->window < least) p->window = least;\n"),
    Change("a long way is a slow one", "(SPAN_US + p->least_us)", "SPAN_US"),
    without("what went out alone tells of the rate", "  if (2ull * chunk->ahead < p->window) return;\n"),
    Change("the first window is the largest", "p->window = first_window(&f->limits);", "p->window = f->limits.window;"),
    without("the last connection's least counts", "  p->least_us = 0;\n"),
    Change("a path that is back is believed in", "p->trial = f->sends && p->epoch;", "p->trial = 0;"),
    Change("a path that is new has to prove itself", "p->trial = f->sends && p->epoch;", "p->trial = f->sends;"),
    without("nobody else sends what is on trial", "  if (p->trial) let_others_take(f, p);\n"),
    without("a trial has no end", "    p->trial = 0;\n"),
    Change("the ring of chunks overflows", "&& p->count < FIFO && ", "&& "),
    Change("chunks that have come are sent again", "~(slot->given[word] | slot->have[word])", "~slot->given[word]"),
    Change("chunks that are under way are sent again", "~(slot->given[word] | slot->have[word])", "~slot->have[word]"),
    Change("a word of chunks is passed over", "(word + 1) * 64", "(word + 2) * 64"),
    Change("messages go before they may", "seq < f->posted && seq < f->allowed", "seq < f->posted"),
    Change("one message goes before it may", "seq < f->allowed; seq++", "seq <= f->allowed; seq++"),
    Change(
        "only the oldest message is sent",
        "if (index == chunks_of(f, slot->size)) continue;",
        "if (index == chunks_of(f, slot->size)) return 0;",
    ),
    without("a chunk that is given is not marked", "    put(slot->given, (int)index);\n"),
    Change("the first chunk is passed over", "slot->next = index + 1;", "slot->next = index + 2;"),
    Change("all chunks are new", "*repeated = index < slot->first_time;", "*repeated = 0;"),
    Change("a suspect path gets chunks", "p->suspect || p->slow ||", "p->slow ||"),
    Change("a slow path gets chunks", "p->suspect || p->slow ||", "p->suspect ||"),
    without("bytes under way are not counted", "  p->unacknowledged += chunk.length;\n"),
    Change("the wrong place in memory", "slot->data + chunk.offset;", "slot->data;"),
    Change(
        "what is done is wanted",
        "return open_slot(f, header->seq) != NULL;",
        "return slot_of(f, header->seq)->seq == header->seq;",
    ),
    Change("a loss is told of with the path's own epoch", "    out->epoch = p->lost_epoch[lost];\n", ""),
    Change(
        "no ACK",
        "    p->ack_due = 0;\n    *out = header_of(p, path, ACK, p->arrived);",
        "    p->ack_due = 0;\n    *out = header_of(p, path, ACK, 0);",
    ),
    Change("an ACK of one chunk too many", "ACK, p->arrived)", "ACK, p->arrived + 1)"),
    Change("a CTS of one message too many", "CTS, f->posted)", "CTS, f->posted + 1)"),
    Change("a CTS of one message too few", "CTS, f->posted)", "CTS, f->posted - 1)"),
    # ------------------------------------------------ hearing
    Change("bytes that come are not heard", "  p->heard_us = now;\n  p->suspect", "  p->suspect"),
    Change("a suspect path stays so", "  p->suspect = p->silent = 0;\n  p->downs", "  p->silent = 0;\n  p->downs"),
    Change("a silent path stays so", "  p->suspect = p->silent = 0;\n  p->downs", "  p->suspect = 0;\n  p->downs"),
    without("a complaint is made though the path is heard again", "  p->downs_due &= (uint8_t)~(1u << path);\n"),
    Change(
        "an ACK's epoch is not compared",
        "!p->live || header->epoch != p->epoch) return 1; // of",
        "!p->live) return 1; // of",
    ),
    Change(
        "an ACK may be of more than was sent",
        "  if (header->seq - p->acknowledged > p->count) return 0;\n",
        "  if (header->seq - p->acknowledged > FIFO) return 0;\n",
    ),
    Change("the ring of chunks does not move on", "p->first = (p->first + 1) % FIFO;", ";"),
    without("acknowledged bytes still fill the window", "    p->unacknowledged -= chunk.length;\n"),
    without("a slow path stays so", "    if (!p->count) p->slow = 0;\n"),
    Change("a slow path gets chunks after one ACK", "if (!p->count) p->slow = 0;", "p->slow = 0;"),
    Change(
        "a chunk that is acknowledged twice counts twice",
        "if (!slot || in(slot->have, index)) continue;\n    put",
        "if (!slot) continue;\n    put",
    ),
    Change(
        "a send is done one chunk early",
        "if (--slot->left == 0) slot->state = SLOT_DONE;\n  }",
        "if (--slot->left <= 1) slot->state = SLOT_DONE;\n  }",
    ),
    Change("a CTS is taken back", "if (header->seq > f->allowed) f->allowed", "f->allowed"),
    Change("a PING does not bring a CTS", "    p->cts_due |= !f->sends; // it may have been lost\n", ""),
    Change("a PING is not answered", "    p->pong_due = 1;\n", ""),
    Change("any PONG ends a complaint", "if (header->seq >= p->deaf_us) p->deaf_us = 0;", "p->deaf_us = 0;"),
    Change("no PONG ends a complaint", "if (header->seq >= p->deaf_us) p->deaf_us = 0;", ""),
    Change(
        "a DOWN's epoch is not compared",
        "!f->path[header->path].live || f->path[header->path].epoch != header->epoch)",
        "!f->path[header->path].live)",
    ),
    Change("a DOWN is not heeded", "      *lost = header->path;\n", ""),
    Change("a complaint ends the path", "if (header->path != path) {", "{"),
    Change("a complaint is not heeded", "    p->deaf_us = now;\n", ""),
    Change(
        "a complaint is not looked into", "    p->ping_due = 1;\n    return 1;\n  case BYE", "    return 1;\n  case BYE"
    ),
    # ------------------------------------------------ receiving
    Change("chunks of messages that nobody asked for", "h->seq >= f->posted || ", ""),
    Change("chunks of the first message that nobody asked for", "h->seq >= f->posted ||", "h->seq > f->posted ||"),
    Change(
        "chunks of an older connection begin",
        "!f->path[h->path].live || h->epoch != f->path[h->path].epoch) return 0;",
        "!f->path[h->path].live) return 0;",
    ),
    Change(
        "chunks of an older connection count",
        "if (h->path != path || h->epoch != p->epoch) return;",
        "if (h->path != path) return;",
    ),
    Change(
        "chunks that have come are written again",
        "return in(slot->have, chunk_index(f, h->offset)) ? NULL : slot->data",
        "return slot->data",
    ),
    Change(
        "chunks longer than the room are written",
        "(slot->begun ? h->total != slot->size : h->total > slot->size)) return NULL;",
        "0) return NULL;",
    ),
    Change("a chunk goes to the message's beginning", "slot->data + h->offset;", "slot->data;"),
    Change("chunks are not counted", "  p->arrived++;\n", ""),
    Change(
        "chunks that come twice are not acknowledged",
        "  p->arrived++;\n  p->ack_due = 1;",
        "  if (open_slot(f, h->seq)) p->arrived++;\n  p->ack_due = 1;",
    ),
    Change("chunks bring no ACK", "  p->ack_due = 1;\n  p->received", "  p->received"),
    Change(
        "a message that is too long is received",
        "slot->state = SLOT_FAILED; // more than",
        "slot->state = SLOT_DONE; // more than",
    ),
    Change(
        "a chunk that comes twice counts twice",
        "if (!slot || in(slot->have, index)) {\n    p->duplicates++;",
        "if (!slot) {\n    p->duplicates++;",
    ),
    Change("a receive keeps the size of its room", "    slot->size = h->total;\n    slot->left", "    slot->left"),
    Change(
        "a receive is done one chunk early",
        "if (--slot->left == 0) slot->state = SLOT_DONE;\n  pass_done",
        "if (--slot->left <= 1) slot->state = SLOT_DONE;\n  pass_done",
    ),
    # ------------------------------------------------ a hostile peer
    Change("a chunk may lie anywhere", "if (h->offset % f->limits.chunk || h->offset > h->total) return 0;", ""),
    Change("a chunk may begin after the message's end", "|| h->offset > h->total) return 0;", ") return 0;"),
    Change(
        "a chunk may have any length",
        "return h->length == (left < f->limits.chunk ? left : f->limits.chunk) &&",
        "return",
    ),
    Change("a chunk may be empty", " && (h->length || h->total == 0);", ";"),
    Change(
        "an ACK may be of a path that there is not",
        "  if (header->path >= f->paths) return 0;\n  flow_path",
        "  flow_path",
    ),
    Change(
        "a DOWN may be of a path that there is not",
        "    if (header->path >= f->paths) return 0;\n    if (!f->path",
        "    if (!f->path",
    ),
    Change("a chunk may be of a path that there is not", "h->path >= f->paths || !f->path[h->path].live ||", ""),
    Change(
        "a receiver may be told ACKs",
        "return f->sends && heard_ack(f, path, header, now);",
        "return heard_ack(f, path, header, now);",
    ),
    Change("a sender may be told chunks", "if (f->sends || h->seq >= f->posted", "if (h->seq >= f->posted"),
    # ------------------------------------------------ time
    Change("silence counts while nobody waits", "p->heard_us > f->busy_us ? p->heard_us : f->busy_us", "p->heard_us"),
    Change("a path that is lost is heard", "if (i != path && f->path[i].live && silence", "if (i != path && silence"),
    Change(
        "a path is another one for itself",
        "if (i != path && f->path[i].live && silence",
        "if (f->path[i].live && silence",
    ),
    Change(
        "who fell silent after another is heard",
        "f->limits.suspect_us < f->limits.dead_us / 2 ? f->limits.suspect_us : f->limits.dead_us / 2;",
        "f->limits.suspect_us;",
    ),
    Change(
        "an idle flow is watched",
        "if (p->live && (p->suspect || p->deaf_us || p->count || missed(f, p))) return 1;",
        "return 1;",
    ),
    Change("a suspect path is not watched", "(p->suspect || p->deaf_us || p->count", "(p->deaf_us || p->count"),
    Change("a path without traffic is not watched", " || missed(f, p)", ""),
    Change(
        "a path without traffic is watched, though all are silent",
        "f->path[i].heard_us >= p->heard_us",
        "f->ticked_us >= p->heard_us",
    ),
    Change("closing is not watched", "if (flow_busy(f) || f->closing) return 1;", "if (flow_busy(f)) return 1;"),
    Change("no path is slow", "if (age(&f->path[path], now) < f->limits.dead_us) return 0;", "return 0;"),
    Change("a path is slow at once", "if (age(&f->path[path], now) < f->limits.dead_us) return 0;", ""),
    Change("a path is slow though all are", "if (age(other, now) < f->limits.suspect_us) return 1;", "return 1;"),
    Change("no PINGs", "    p->ping_due = 1;\n    p->cts_due", "    p->cts_due"),
    Change(
        "PINGs are rare while somebody waits", "flow_watches(f) ? f->limits.ping_us : 20", "0 ? f->limits.ping_us : 20"
    ),
    Change("a lost path is lost later", "if (silent >= f->limits.dead_us) {", "if (silent >= 2 * f->limits.dead_us) {"),
    Change(
        "a lost path is lost earlier", "if (silent >= f->limits.dead_us) {", "if (silent >= f->limits.suspect_us) {"
    ),
    Change("a receiver does not complain", "if (!p->silent && !f->sends) {", "if (0) {"),
    Change(
        "a complaint has a wrong epoch", "      p->lost_epoch[path] = p->epoch;\n", "      p->lost_epoch[path] = 0;\n"
    ),
    Change(
        "a path is lost though all are silent",
        "if (others && now - f->apart_us >= f->limits.dead_us) verdict->lost",
        "if (1) verdict->lost",
    ),
    Change(
        "a path is lost when the first other speaks",
        "if (others && now - f->apart_us >= f->limits.dead_us)",
        "if (others)",
    ),
    Change("no path is lost by silence", "if (others && now - f->apart_us >= f->limits.dead_us)", "if (0)"),
    Change("no path is tried anew", "    else verdict->probe |= (uint8_t)(1u << path);\n", ""),
    Change("a complaint of when we were stopped is heeded", "now - f->busy_us >= f->limits.suspect_us)", "1)"),
    Change(
        "a path to which the peer is deaf is not tried anew",
        "  if (p->deaf_us && now - f->busy_us >= f->limits.suspect_us) verdict->probe |= (uint8_t)(1u << path);\n",
        "",
    ),
    Change("no path is suspect", "if (silent >= f->limits.suspect_us && others) {", "if (0) {"),
    Change(
        "all paths are suspect at once",
        "if (silent >= f->limits.suspect_us && others) {",
        "if (silent >= f->limits.suspect_us) {",
    ),
    Change("a suspect path keeps its chunks", "    p->suspect = 1;\n    let_others_take(f, p);", "    p->suspect = 1;"),
    Change("a slow path keeps its chunks", "    p->slow = 1;\n    let_others_take(f, p);", "    p->slow = 1;"),
    Change(
        "who was stopped holds it against the others",
        "if (!f->watched || stopped)",
        "if (!f->watched)",
    ),
    Change(
        "who did not wait holds it against the others",
        "if (!f->watched || stopped)",
        "if (stopped)",
    ),
    Change(
        "who was stopped has slept only until its next tick",
        "has_slept(f, now) || (f->woke_us && now - f->woke_us < f->limits.suspect_us)",
        "has_slept(f, now)",
    ),
    Change(
        "who was stopped has slept only after its next tick",
        "has_slept(f, now) || (f->woke_us && now - f->woke_us < f->limits.suspect_us)",
        "(f->woke_us && now - f->woke_us < f->limits.suspect_us)",
    ),
    Change(
        "who was stopped once has slept for ever",
        "f->woke_us && now - f->woke_us < f->limits.suspect_us",
        "f->woke_us",
    ),
    Change(
        "who is stopped while nobody waits has not slept",
        "f->limits.dead_us / 2 + (f->watched ? 0 : SELDOM_US);",
        "f->limits.dead_us / 2 && f->watched;",
    ),
    Change(
        "who is stopped before its first tick has not slept",
        "  if (!f->ticked_us) f->ticked_us = now; // it may be stopped before the first tick\n",
        "",
    ),
    Change(
        "giving up counts on after the peer was heard", "    f->cut_us = 0;\n    return verdict;", "    return verdict;"
    ),
    Change("it gives up at once", "now - f->cut_us >= f->limits.giveup_us &&", "1 &&"),
    Change("it never gives up", "if (f->limits.giveup_us && now", "if (0 && now"),
    Change("it gives up though it may not", "if (f->limits.giveup_us && now", "if (now"),
]

# Each with its reason.
EQUIVALENT = {
    "a path is another one for itself": "whom this is asked of is silent for longer than those that are heard may be",
    "others take what was acknowledged, too": "a chunk that is acknowledged is never free (first_free), given or not",
}
