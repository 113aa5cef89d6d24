"""More of the same: tests of a kind that `make test` shows by another one. They run in `make soak`.

By file: what their names contain. `conftest` marks them, and refuses an entry that no test of its file answers to.
"""

from __future__ import annotations

MORE: dict[str, tuple[str, ...]] = {
    "test_buddies": ("record_is_replaced[forward]", "record_is_replaced[between]",),
    "test_case_01_hidden_state": (
        "[in-place]", "[epochs]", "in_a_move[python]", "[section:16:0", "within_an_item", "in_a_move[torch]",
        "carried[numpy]", "carried[grad:10:1,after:11:0]",
    ),
    "test_case_06_own_checkpoint": ("write[offset]", "write[shrink]", "[skip-once]", "[plain-once]",),
    "test_case_07_own_while_loop": ("[epochs]", "[metrics]", "it_has_no_end", "a_move_comes_to", "[committed]",),
    "test_case_0_between_calls": (
        "refused[large", "matter[noise]", "matter[globals]", "matter[carried]", "matter[count]", "matter[added]",
        "matter[drawn]", "have_saved[lr]", "target_of_a_move", "[counted]", "numbers_without", "by_an_iterator",
    ),
    "test_case_10_layers_later": ("[before]", "[skipped]", "[flag]", "[group]", "a_move_after",),
    "test_case_13_uneven": ("[abort-134]", "[zero-", "[inside-", "[unlike-", "counter_is_carried",),
    "test_case_26_edited": (
        "link_that_leads", "by_its_name", "target_of_a_move", "could_not_be_kept", "all_ranks_that", "are_spawned",
    ),
    "test_case_before_a_section": (
        "undisturbed[save-grad:41:0]", "undisturbed[save-eval", "undisturbed[norm-grad:25",
        "undisturbed[clip-grad:25", "undisturbed[begin", "undisturbed[two", "undisturbed[rate-loops",
        "undisturbed[rate-own", "undisturbed[draw-grad", "read[swap-eval", "read[loads", "target_of_a_move",
        "[rate-head", "[rate-two", "[draw-two", "read[two-grad", "[norm-grad:31", "[clip-grad:31", "[final-end",
    ),
    "test_case_bound_anew": (
        "each_by_itself", "[within]", "[inside]", "target_of_a_move", "talked[grad:2", "[hook]", "imports[between]",
        "by_its_name", "told[between]",
    ),
    "test_case_collected": (
        "[set]", "[dict]", "[nested]", "[wrapped]", "[sum]", "[star]", "[map]", "[reduce]", "[next]", "[plain]",
    ),
    "test_case_drawn_with_items": (
        "[python]", "[torch]", "move[numpy]", "[epoch]", "[numpy]", "[global]", "move[workers]",
    ),
    "test_case_exits": ("[logs-1]", "child_that_the_script",),
    "test_case_foreign_groups": ("joined[late]", "joined[default]",),
    "test_case_on_device": (
        "_off[total", "_off[means", "_off[window", "_off[meter", "_off[counter", "_off[half", "_off[schedule",
        "_off[closure", "_off[pinned", "_off[side", "_off[late", "_off[table", "_off[buffer", "_off[hung",
        "_off[static", "_off[generator", "_off[global", "_off[events", "_off[memory", "_off[scaler", "_off[autocast",
        "_off[graphed", "_off[captured", "_off[fused", "_off[stream", "[grad:12:1-zeroed]", "[grad:12:1-momentum]",
        "[after:12:0-stale]", "[after:12:0-zeroed]", "[after:12:0-momentum]", "[average-", "[prefetch-", "[large-",
        "_off[inplace",
    ),
    "test_case_odd_tensors": (
        "[graph]", "[graph-nested]", "[complex]", "[quarter]", "[conjugated]", "[csr-", "[nested-", "[parameter-",
    ),
    "test_case_set_elsewhere": (
        "carried[dataset]", "carried[concat]", "carried[sampler]", "carried[batches]", "carried[order]",
        "carried[logger]", "carried[thread]", "carried[numpy]", "carried[sys]", "carried[function]", "carried[named]",
        "carried[partial]", "carried[swapped]", "carried[indices]", "carried[argv]", "carried[subset]",
        "carried[torch]",
        "move[class]", "move[tensors]", "refused[seeds-",
        "refused[hook-", "carried[ctype]", "carried[ctypes]", "carried[view]", "carried[row]", "carried[block]",
        "carried[denormals]", "carried[errors]", "carried[digits]",
    ),
    "test_case_hung": (
        "[counter-", "[window-", "[array-", "[rebound-", "[later-", "[tuple-", "[numpy-", "[list-group]", "[nested-",
        "[list-loader]", "[replaced-", "[own-schedule", "[generator-group", "[iterator-",
        "target_of_a_move",
    ),
    "test_case_iterators_beside": (
        "[islice]", "[count]", "[inner]", "[map]", "[progress]", "replacement_of_a", "after_a_move", "[tee", "[keep",
        "[sums", "[list]",
    ),
    "test_case_kept": (
        "[flag]", "[namedtuple]", "[frozen]", "[nonlocal]", "[deque]", "[list]", "[global]", "[default]",
        "[contextvar]", "[environ]", "[namespace]", "[thread]", "[module]", "[slots]", "[class]", "[late]", "[cached",
        "steps[defaultdict]", "steps[counter]", "twice[defaultdict]", "twice[function]", "the_first_to_count",
        "[iterator", "[cycle", "[large", "each_example", "[begins-", "see[held]", "see[nested", "see[keyword]",
        "see[users]", "see[chain]", "see[numbers]", "see[made]", "see[settings", "see[tensor", "twice[own-dict]",
        "see[closure]", "see[raw]", "[enum]", "[closure-late]", "twice[counter]", "twice[descriptor]", "[lazy-after",
        "[generator-grown]", "[drawn-late]",
    ),
    "test_case_kept_tensors": ("[begin]", "[twice]", "[variable]", "[rows]", "long_row_of_them",),
    "test_case_late_decision": ("[early", "after_the_last_step",),
    "test_case_meters": ("[dict]", "[default]", "[list]", "made_once[grad:9", "[logger]", "[along]",),
    "test_case_of_libraries": (
        "[queue-", "[polynomial-", "[bytes-", "[message-", "[context-", "[settings-", "[sorted-local",
        "[normal-between", "[masked-", "[progress-local]", "[filed-", "[graph-between", "[progress-step",
        "called_off", "[third-local", "[fitted-between", "[late-step", "[third-step", "[late-between",
    ),
    "test_case_ordinary": (
        "[decides]", "[namespace]", "in_the_end[module]", "in_the_end[dict]", "any_more[module]", "any_more[dict]",
        "[grad:17:0]", "anew[]", "gradients[]", "[after:10:0]", "[position]", "[meter]", "in_the_end[object]",
        "gradients[both]", "anew[own]", "[threads]",
    ),
    "test_case_outgrows": (
        "[dict]", "[named]", "goes_on[counter]", "goes_on[fields]", "on[lazy]", "refused[rows]", "refused[lazy]",
        "on[rows]",
    ),
    "test_case_own_state": (
        "[array-", "[dict-grad:3", "[late-grad:110", "move[meter]", "[tensor-grad", "[inside-grad", "refused[late]",
        "refused[large]", "buffer-grad", "move[tensor]",
    ),
    "test_case_own_stream": ("[tuple]", "[list]", "[dict]", "[argument]", "[buffer]",),
    "test_case_own_variables": ("[teacher-", "[best-", "and_after_a_move", "carried_if_it_was",),
    "test_case_places": ("[migrate]", "[kill]",),
    "test_case_reads_between": ("[norm]", "[told]", "[zeroes]", "[freeze]", "[moments]", "[eval]",),
    "test_case_recurrent": (
        "[global-", "[trainer-pairs", "[module-in", "[trainer-record", "[trainer-dict", "[module-deque",
        "[module-list", "[module-plain", "[module-record", "[trainer-frozen", "[module-row", "[trainer-space",
        "[module-slots", "[module-user", "[module-default", "[trainer-ordered", "[trainer-attributes", "[unread-pair",
        "[unread-row", "[shown-tuple", "[shown-pair", "[shown-in", "[trainer-in_dict", "[trainer-pair-",
        "[module-of_lists", "[trainer-arrays", "[unread-plain", "[unread-attributes", "[module-pair-large",
        "[module-dict-large", "[shown-plain", "late-put", "[trainer-tuple-large-late", "[module-frozen",
        "[module-pair-small", "[shown-dict", "[unread-tuple-large]", "[module-tuple-large]",
        "[trainer-itself-small-first-put",
    ),
    "test_case_returned": (
        "[graph]", "[item]", "[own-clip]", "[later-", "have[all]", "nothing_is_known_yet", "[detach]",
    ),
    "test_case_saved": (
        "[norm-grad:25:1", "[random-", "[path-", "target_of_a_move", "[counter-grad", "refused[own]",
    ),
    "test_case_stale_gradients": (
        "[gan-grad:26", "[clip-grad:2:1]", "[clip-grad:27", "[log-grad:26", "move[gan]", "between_two_steps",
        "[gan-grad:3", "move[clip]",
    ),
    "test_case_two_steps": (
        "[again]", "[prints-after", "counts_by_what", "refused[after:8:0]", "lacks_nothing", "refused[other]",
        "cannot_stand_for",
    ),
    "test_case_undisturbed": (
        "[collected]", "[hard-examples]", "[kept-between]", "[late-decision]", "[meters]", "[kept-elsewhere]",
        "[edited]", "[fake-dimensions]", "[layers-later]", "[own-places]", "[two-steps]", "[uneven]",
        "[own-attributes]", "[own-data]", "[own-sampler]", "[own-stream]", "[own-variables]", "[rules]",
        "[second-loader]", "[saves-between]", "[returned]", "[saved]", "[own-while-loop]", "[kept-copies]",
        "[sparse-gradients]", "[changed-once]", "[only-ones]", "[averages]", "[packages]", "[own-checkpoint]",
        "[written-in-place]", "[outgrows]", "[rebound-buffers]", "[bound-anew]", "[left-behind]", "[raises-on]",
        "[kept-inside]", "[forgetful-loader]", "[outside-decision]", "[reads-between]", "[of-libraries]", "[exits]",
        "[own-state]", "[evaluates-between]", "[own-objects]", "[kept-tensors]", "[hung]",
    ),
    "test_case_written_in_place": (
        "[alias]", "[numpy]", "[large-view]", "[large-torch]", "target_of_a_move", "[held]", "[large-numpy]",
        "undisturbed[buffer]",
    ),
    "test_cases": ("after_a_kill_and_a_move",),
    "test_cli_simulate": ("published_table_is_met",),
    "test_ddp": (
        "redone_to_the_same_bits[views]", "redone_to_the_same_bits[a hook]", "redone_to_the_same_bits[copied",
        "redone_to_the_same_bits[unused", "replaced_to_the_same_bits[views", "replaced_to_the_same_bits[a hook",
        "replaced_to_the_same_bits[copied", "replaced_to_the_same_bits[static", "replaced_to_the_same_bits[unused",
        "replaced_to_the_same_bits[a built", "redone_to_the_same_bits[a built", "redone_to_the_same_bits[buffers",
    ),
    "test_dry_run": (
        "bits[saved]", "bits[scaler]", "bits[stream]", "told[dict]", "told[raises]", "told[skips]", "told[once]",
        "told[asks]", "told[counts]", "told[unwanted]", "told[place]", "told[own]",
    ),
    "test_faults": ("is_noticed[cursor]",),
    "test_halts": (
        "go_past_a_call", "gate_of_a_halt", "at_the_safepoint_of_a_halt", "told_again_in_its_generation",
        "at_the_end_of_the_script", "serves_is_not_needed", "leaves_a_record_before",
    ),
    "test_halts_and_core": ("not_wanted_any_more", "outgoing_that_dies", "lost_after_the_cutover",),
    "test_identity": ("known[getenvb]", "known[not contains]", "known[setdefault]", "known[copy]", "known[splat]",),
    "test_layouts": ("bits[pp-", "launch[hsdp", "launch[fsdp", "bits[ddp-rich",),
    "test_lost_journals": ("bits[flip]", "bits[zero]", "bits[remove_wal]", "bits[remove_all",),
    "test_lost_nodes": ("whose_processes_all_die",),
    "test_network_for_real": ("persons_taint",),
    "test_paths_for_real": ("storm_of_flaps",),
    "test_preempted": (
        "runs[SIGHUP]", "runs[SIGINT]", "may_go_on_to_its_own_end", "can_be_one_that_ends",
        "alone_is_for_its_handler", "nobody_listens", "once[SIGINT]", "second_signal", "without_a_handler",
        "from_their_handlers_with_0",
    ),
    "test_proofs": (
        "[doers:", "[around:", "[strayed:", "[incomplete:", "[tensors:", "[objects:", "[rows:", "[later:",
        "[buffers:", "[rolled back:", "[hidden:", "[looks:", "[proving:", "[tail:", "[returned:", "[comparing:",
        "[arguments:", "[kept:", "[collected:", "[foresight:", "[still:", "[holdings: the record", "[holdings: other",
        "[holdings: what changes", "[holdings: only", "[holdings: each", "[holdings: functions", "[holdings: own",
        "[given: what a step", "[given: other", "[reads:", "[code: a replacement", "[own: another", "[own: and",
        "[own: what", "[own: buffers", "[saved: what", "[saved: load", "[saved: statistics", "[plain: a call",
        "[lying: those", "[lying: a", "[lying: in", "[drawn: states", "[drawn: a call", "[way: values",
        "[lent: lenders", "[lent: what has", "[lent: what nobody", "[lent: a generator", "[lent: entries",
        "[lent: a record", "[library: one", "[library: containers", "[library: an odd", "[results:",
        "[drawn: an item", "[plain: an", "[way: nothing", "[way: a section", "[saved: a schedule", "[own: a record",
        "[lying: gradients", "[plain: what", "[untold: what came", "[rehearsal:", "[given: a call",
        "[hung: options of", "[hung: what", "[library: what has", "[library: what changes late", "[library: a call",
        "[library: what an", "[library: nobody",
    ),
    "test_restored_from_all": ("a_large_state_comes",),
    "test_run": (
        "[scaler-", "[loader_workers-", "[saved-", "[sections-forward]", "[sections-between]", "[saved_by_path-",
        "[two_optimizers-", "[stream-", "[tracker-", "[tracker_cut-", "[accumulate-forward]", "[plain-between]",
        "[plain-update]",
    ),
    "test_script_logging": ("python[not]",),
    "test_sharing_for_real": ("[hsdp]",),
    "test_silent": ("[edited-late-module-move]", "[sampler-numpy-drain]", "[own-tokens-by-time-kill]",),
    "test_train_gpt": ("layouts[tp]", "layouts[fsdp]",),
    "test_worker": ("job[late_refusal", "job[differs", "job[drifts",),
}  # fmt: skip
