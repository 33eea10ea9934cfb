//! Scenarios of buffers' lifecycles, made step by step.
//!
//! The scenarios are functions, so that they also run against the mutants.

use super::{Client, Home, LARGE, MEDIUM, class, list_at};
use farside_node::Progress;
use farside_node::identity::Sender;
use farside_remote::arena::reuse::Retirees;
use farside_remote::arena::state::{Stage, State, owner};
use farside_remote::arena::{Arena, Geometry, header};
use farside_remote::control::{Answer, Ask};
use farside_remote::fabric::FENCED;
use farside_remote::{By, Key, Memory, Rights, Width};
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

/// Passes the names of all cases to a macro. No other list of the cases exists.
macro_rules! with_all_cases {
    ($do:ident) => {
        $do! {
            a_dead_clients_unpublished_buffer_is_reclaimed
            a_retired_buffer_on_no_list_is_reclaimed
            a_replaced_but_unretired_buffer_is_reclaimed
            a_live_clients_buffer_is_left_alone
            a_stopped_client_delays_reuse
            a_stopped_client_delays_a_scan_and_is_named
            a_stopped_client_delays_a_drop_and_is_named
            only_clients_that_delay_are_named
            a_scan_waits_for_the_client_that_replaced_a_suspect
            a_second_retirement_is_refused
            a_buffer_is_not_reused_while_a_scan_adopts_it
            a_dropped_store_leaves_only_zeros
            a_drop_loses_no_buffer_of_another_store
            a_buffer_retired_after_its_stores_drop_is_on_no_list
            a_session_that_ends_twice_ends_once
            a_cyclic_retired_list_is_reclaimed
            a_retired_list_with_a_wild_pointer_is_cut_there
            two_merging_retired_lists_are_reclaimed
            an_emptied_segment_waits_for_clients_that_may_help
            a_dropped_stores_buffers_do_not_affect_the_next_store
            a_fenced_nonce_is_refused_until_its_store_is_dropped
            a_fence_waits_for_turns_and_names_a_stopped_process
            a_fence_ends_a_clients_sessions_at_every_engine
            a_buffer_waits_for_two_epochs_of_each_client
            a_leaked_buffer_waits_for_the_epochs_of_clients
            a_drop_waits_for_no_epoch
            sessions_reuse_no_buffer_while_a_scan_adopts_it
            a_rebuild_reads_no_item_that_a_session_may_reuse
            a_dropped_stores_buffers_leave_the_lists_of_sessions_that_reuse_them
            a_session_that_dies_while_it_moves_buffers_loses_none
            a_drop_finds_the_buffers_that_move_while_it_takes_lists
            a_session_keeps_no_buffer_that_another_needs
            a_dead_session_delays_reuse_until_it_is_closed
            a_node_that_takes_over_ends_reuse_and_begins_it_again
            a_damaged_list_of_reused_buffers_is_cut_there
        }
    };
}
#[allow(unused_imports, reason = "each test file uses a part of this")]
pub(crate) use with_all_cases;

macro_rules! list {
    ($($name:ident)*) => {
        /// The names and functions of all cases.
        pub(crate) const CASES: &[(&str, fn())] = &[$((stringify!($name), $name)),*];
    };
}
with_all_cases!(list);

pub(crate) fn a_dead_clients_unpublished_buffer_is_reclaimed() {
    let mut home = Home::new();
    let client = home.client();
    client.begin_turn();
    let (held, installed) = (client.take(), client.take());
    client.install(3, installed);
    home.idle();
    assert_eq!(home.stage(held), Stage::Live);
    home.kill(&client);
    home.idle();
    assert_eq!(home.stage(held), Stage::Free, "no client has its address any more");
    assert_eq!(home.stage(installed), Stage::Live, "it is reachable");
    assert_eq!(home.node.info().scanned_buffers, 1);
}

pub(crate) fn a_retired_buffer_on_no_list_is_reclaimed() {
    let mut home = Home::new();
    let client = home.client();
    client.begin_turn();
    let (first, second, third) = (client.take(), client.take(), client.take());
    assert!(client.retire(first) && client.retire(second));
    client.begin_to_retire(third);
    home.kill(&client);
    home.idle();
    for at in [first, second, third] {
        assert_eq!(home.stage(at), Stage::Free);
    }
    assert_eq!(home.node.info().scanned_buffers, 1, "two were on the list");
}

pub(crate) fn a_replaced_but_unretired_buffer_is_reclaimed() {
    for is_seen_before in [true, false] {
        let mut home = Home::new();
        let (owner_alive, client) = (home.client(), home.client());
        let old = owner_alive.in_turn(|client| {
            let old = client.take();
            client.install(0, old);
            old
        });
        if is_seen_before {
            home.scan().expect("the scan ends");
            assert_eq!(home.state(old).owner, owner::NONE, "it belongs to the structure now");
        }
        client.begin_turn();
        let new = client.take();
        assert_eq!(client.install(0, new), old);
        home.kill(&client);
        home.idle();
        let expected = if is_seen_before { Stage::Free } else { Stage::Live };
        assert_eq!(home.stage(old), expected, "it can be freed only if a scan saw it reachable before");
        home.kill(&owner_alive);
        home.idle();
        assert_eq!((home.stage(old), home.stage(new)), (Stage::Free, Stage::Live));
    }
}

pub(crate) fn a_live_clients_buffer_is_left_alone() {
    let mut home = Home::new();
    let (holder, other) = (home.client(), home.client());
    let held = holder.in_turn(|client| client.take());
    home.kill(&other);
    home.idle();
    home.scan().expect("the scan ends");
    holder.in_turn(|_| ());
    home.poll_shared();
    assert_eq!(home.state(held).owner, holder.id.number);
    assert_eq!(home.stage(held), Stage::Live, "its owner may yet install it");
}

pub(crate) fn a_stopped_client_delays_reuse() {
    let mut home = Home::new();
    let (reader, writer) = (home.client(), home.client());
    let old = writer.in_turn(|client| client.take());
    writer.install(0, old);
    reader.begin_turn();
    writer.in_turn(|client| {
        let new = client.take();
        client.install(0, new);
        assert!(client.retire(old));
    });
    home.poll_shared();
    home.poll_shared();
    assert_eq!(home.stage(old), Stage::Retired, "the reader may hold a pointer to it");
    assert_eq!(home.node.delayed_by(), [reader.pid]);
    assert_eq!(home.stat().delaying_pids, [reader.pid]);
    reader.end_turn();
    home.poll_shared();
    assert_eq!(home.stage(old), Stage::Free);
    assert!(home.node.delayed_by().is_empty());
}

pub(crate) fn a_stopped_client_delays_a_scan_and_is_named() {
    let mut home = Home::new();
    let stopped = home.client();
    stopped.begin_turn();
    assert!(home.scan().is_none(), "a client is in a turn");
    assert_eq!(home.node.delayed_by(), [stopped.pid]);
    home.kill(&stopped);
    home.idle();
    assert!(matches!(home.node.answer(), Some((_, Ok(Answer::Done)))));
    assert!(home.node.delayed_by().is_empty());
}

pub(crate) fn a_stopped_client_delays_a_drop_and_is_named() {
    let mut home = Home::new();
    let stopped = home.client();
    stopped.begin_turn();
    let before = home.node.info().unassigned_bytes;
    assert!(home.ask(Ask::DropStore { name: "s".into() }).is_none(), "a client is in a turn");
    assert_eq!(home.node.info().unassigned_bytes, before);
    assert_eq!(home.node.delayed_by(), [stopped.pid]);
    stopped.end_turn();
    home.idle();
    assert!(matches!(home.node.answer(), Some((_, Ok(Answer::Done)))));
    assert_eq!(home.node.info().unassigned_bytes, before + (6 << 20));
}

pub(crate) fn only_clients_that_delay_are_named() {
    let mut home = Home::new();
    let (first, second, third) = (home.client(), home.client(), home.client());
    first.begin_turn();
    third.begin_turn();
    second.in_turn(|client| {
        let at = client.take();
        client.retire(at)
    });
    home.poll_shared();
    assert_eq!(home.node.delayed_by().len(), 2);
    first.end_turn();
    home.idle();
    assert_eq!(home.node.delayed_by(), [third.pid], "the first has moved on");
    first.begin_turn();
    home.idle();
    assert_eq!(home.node.delayed_by(), [third.pid], "that is another turn");
}

pub(crate) fn a_scan_waits_for_the_client_that_replaced_a_suspect() {
    let mut home = Home::new();
    let client = home.client();
    let old = client.in_turn(|client| client.take());
    client.install(0, old);
    home.scan().expect("the scan ends");
    // In this turn the client has replaced `old`, but not retired it yet.
    client.begin_turn();
    let new = client.take();
    assert_eq!(client.install(0, new), old);
    assert!(home.scan().is_none(), "the scan waits");
    assert_eq!(home.stage(old), Stage::Live, "the client that replaced it will retire it");
    assert!(client.retire(old), "it is this client's to retire");
    client.end_turn();
    home.idle();
    home.poll_shared();
    assert_eq!(home.stage(old), Stage::Free);
    assert_eq!(home.node.info().scanned_buffers, 0);
}

pub(crate) fn a_second_retirement_is_refused() {
    let mut home = Home::new();
    let (first, second) = (home.client(), home.client());
    let at = first.in_turn(|client| client.take());
    assert!(first.retire(at));
    assert!(!second.retire(at), "it is retired already");
    home.poll_shared();
    assert_eq!(home.stage(at), Stage::Free);
    assert!(!second.retire(at), "it is free already");
    second.in_turn(|_| ());
    home.poll_shared();
    assert_eq!(home.stage(at), Stage::Free);
    let again = first.in_turn(|client| client.take());
    let other = first.in_turn(|client| client.take());
    assert_eq!(again, at);
    assert_ne!(again, other, "no buffer is allocated twice");
}

pub(crate) fn a_buffer_is_not_reused_while_a_scan_adopts_it() {
    let mut home = Home::new();
    let client = home.client();
    let installed = client.in_turn(|client| {
        let installed: Vec<u64> = (0..14).map(|_| client.take()).collect();
        installed.iter().zip(0..).for_each(|(&at, slot)| assert_eq!(client.install(slot, at), 0));
        installed
    });
    let first = installed[0];
    let _scan = home.node.ask(Ask::Scan { name: "s".into() }, [1, 1]);
    while home.kind.looks.load(Ordering::Relaxed) == 0 {
        assert_eq!(home.step(), Progress::Made);
    }
    // The scan has read the slots, but has not made the structure the owner of their buffers yet.
    client.in_turn(|client| {
        let new = client.take();
        assert_eq!(client.install(0, new), first);
        assert!(client.retire(first));
    });
    home.node.poll_shared();
    let mut steps = 0;
    while home.stage(first) != Stage::Free {
        home.step();
        steps += 1;
        assert!(steps < 1000, "the retired buffer is reclaimed");
    }
    // The buffer is allocated again, to be installed in a later turn.
    let again = client.in_turn(|client| client.take());
    assert_eq!(again, first);
    home.idle();
    assert!(matches!(home.node.answer(), Some((_, Ok(Answer::Done)))));
    assert_eq!(home.state(again).owner, client.id.number, "a live client holds it");
    home.scan().expect("the scan ends");
    client.in_turn(|_| ());
    home.idle();
    assert_eq!(home.stage(again), Stage::Live, "its owner may yet install it");
}

pub(crate) fn a_dropped_store_leaves_only_zeros() {
    let mut home = Home::new();
    let client = home.client();
    let kept = client.in_turn(|client| {
        client.write(client.store.table_at, &[0x5e; 256]);
        for _ in 0..20 {
            let at = client.take();
            client.write(at, &[0x5e; 60_000]);
        }
        let retired = client.take();
        client.write(retired, &[0x5e; 60_000]);
        client.retire(retired);
        client.take()
    });
    let Some(Answer::Done) = home.ask(Ask::DropStore { name: "s".into() }) else { panic!("it is dropped") };
    assert!(!client.retire(kept), "it is not a buffer of this region any more");
    let after = home.create("after", 10);
    let entry = home.node.catalog().get("after").expect("it was just made");
    assert!(entry.segments.len() >= 11, "it has all segments that the first one had");
    let mut bytes = vec![1; 1 << 20];
    for &index in &entry.segments {
        let Ok(()) = home.memory.read(home.memory.geometry().segment_at(index), &mut bytes);
        assert!(bytes.iter().all(|&byte| byte == 0), "segment {index} contains another store's data");
    }
    assert_ne!(after.table_at, 0);
}

pub(crate) fn a_drop_loses_no_buffer_of_another_store() {
    let mut home = Home::new();
    let other = home.create("other", 4);
    let mut client = home.client();
    let kept = client.in_turn(|client| client.take());
    client.retire(kept);
    client.store = other;
    let dropped = client.in_turn(|client| client.take());
    client.retire(dropped);
    let Some(Answer::Done) = home.ask(Ask::DropStore { name: "other".into() }) else {
        panic!("it is dropped")
    };
    home.poll_shared();
    assert_eq!(
        home.stage(kept),
        Stage::Free,
        "it came after a buffer of the dropped store on its session's list"
    );
}

pub(crate) fn a_buffer_retired_after_its_stores_drop_is_on_no_list() {
    let mut home = Home::new();
    let other = home.create("other", 4);
    let mut client = home.client();
    let kept = client.in_turn(|client| client.take());
    client.store = other;
    let (early, late) = (client.in_turn(|client| client.take()), client.in_turn(|client| client.take()));
    assert!(client.in_turn(|client| client.give_back(early)), "its store has a key");
    let held_up = home.client();
    held_up.begin_turn();
    let Some(Answer::Done) = home.ask(Ask::DropStore { name: "other".into() }).or_else(|| {
        assert!(!client.in_turn(|client| client.give_back(late)), "the key is gone, the segments not yet");
        held_up.end_turn();
        home.idle();
        home.node.answer().map(|(_, answer)| answer.expect("it is dropped"))
    }) else {
        panic!("it is dropped")
    };
    client.store = home.store.clone();
    client.retire(kept);
    home.poll_shared();
    assert_eq!(home.stage(kept), Stage::Free, "no buffer of the dropped store precedes it on the list");
}

pub(crate) fn a_session_that_ends_twice_ends_once() {
    let mut home = Home::new();
    let first = home.client();
    home.kill(&first);
    home.part(&first);
    home.idle();
    assert!(home.node.sessions().is_empty());
    let second = home.client();
    assert_eq!(second.id.slot, first.id.slot);
    home.kill(&first);
    home.idle();
    assert_eq!(home.node.sessions().len(), 1, "the slot belongs to another session by now");
    second.begin_turn();
    let held = second.take();
    second.retire(held);
    home.poll_shared();
    assert_eq!(home.stage(held), Stage::Retired, "the second session still delays it");

    let (third, fourth) = (home.client(), home.client());
    home.kill(&third);
    home.kill(&third);
    home.kill(&fourth);
    let fifth = home.client();
    home.idle();
    assert_eq!(home.node.sessions().len(), 2);
    assert!(home.node.sessions().iter().any(|session| session.id == fifth.id));
}

pub(crate) fn a_cyclic_retired_list_is_reclaimed() {
    let mut home = Home::new();
    let client = home.client();
    let at: [u64; 3] = client.in_turn(|client| [(); 3].map(|()| client.take()));
    at.iter().for_each(|&at| assert!(client.retire(at)));
    home.damage_state(at[0], |state| State { next: at[2], ..state });
    home.poll_shared();
    at.iter().for_each(|&at| assert_eq!(home.stage(at), Stage::Free));
    let again: [u64; 4] = client.in_turn(|client| [(); 4].map(|()| client.take()));
    again.iter().enumerate().for_each(|(i, at)| assert!(!again[..i].contains(at), "each is allocated once"));
}

pub(crate) fn a_retired_list_with_a_wild_pointer_is_cut_there() {
    for wild in [u64::MAX >> 16 & !15, 8, 4096 + 3, 1, 1 << 40] {
        let mut home = Home::new();
        let client = home.client();
        let at: [u64; 3] = client.in_turn(|client| [(); 3].map(|()| client.take()));
        at.iter().for_each(|&at| assert!(client.retire(at)));
        home.damage_state(at[1], |state| State { next: wild, ..state });
        home.poll_shared();
        assert_eq!(home.stage(at[2]), Stage::Free);
        assert_eq!(home.stage(at[1]), Stage::Free);
        assert_eq!(home.stage(at[0]), Stage::Retired, "no list leads to it");
        home.kill(&client);
        home.idle();
        assert_eq!(home.stage(at[0]), Stage::Free, "a scan found it");

        let second = home.client();
        second.damage_list(wild);
        home.poll_shared();
        home.kill(&second);
        home.idle();
        assert!(home.node.sessions().is_empty());
    }
}

pub(crate) fn two_merging_retired_lists_are_reclaimed() {
    let mut home = Home::new();
    let (first, second) = (home.client(), home.client());
    let shared: [u64; 2] = first.in_turn(|client| [(); 2].map(|()| client.take()));
    let own = second.in_turn(|client| client.take());
    shared.iter().for_each(|&at| assert!(first.retire(at)));
    assert!(second.retire(own));
    home.damage_state(own, |state| State { next: shared[0], ..state });
    home.poll_shared();
    home.kill(&first);
    home.kill(&second);
    home.idle();
    [own, shared[0], shared[1]].iter().for_each(|&at| assert_eq!(home.stage(at), Stage::Free));
}

/// A client that was stopped while it helped a take may still compare with old states of that segment's buffers. The
/// states must not return to these values as long as the client may exchange them.
pub(crate) fn an_emptied_segment_waits_for_clients_that_may_help() {
    let mut home = Home::of(24, 9);
    let (writer, helper) = (home.client(), home.client());
    // Seven of the eight segments become large buffers. All of these are freed, while no client wants the memory.
    let count = class(LARGE).count as usize * 7;
    let all: Vec<u64> = writer.in_turn(|client| (0..count).map(|_| client.take()).collect());
    all.iter().for_each(|&at| assert!(writer.retire(at)));
    home.poll_shared();
    all.iter().for_each(|&at| assert_eq!(home.stage(at), Stage::Free));
    helper.begin_turn();
    writer.in_turn(|client| client.take_of(MEDIUM));
    home.poll_shared();
    home.poll_shared();
    let stat = home.stat();
    assert!(stat.parked_buffers >= 15, "the store is short of memory, so segments are emptied: {stat:?}");
    assert_eq!(stat.granted_bytes, 1 << 20, "only the reserve is granted yet: {stat:?}");
    helper.end_turn();
    home.poll_shared();
    let stat = home.stat();
    assert!(stat.granted_bytes > 1 << 20, "an emptied segment serves any class: {stat:?}");
}

/// A buffer is being reclaimed when its store is dropped. Another store gets the same memory, and its buffer at the
/// same address is reclaimed, too: that buffer must get its own grace period.
pub(crate) fn a_dropped_stores_buffers_do_not_affect_the_next_store() {
    let mut home = Home::new();
    let (client, stopped) = (home.client(), home.client());
    let old = client.in_turn(|client| client.take());
    assert!(client.retire(old));
    stopped.begin_turn();
    assert!(home.ask(Ask::DropStore { name: "s".into() }).is_none(), "a client is in a turn");
    stopped.end_turn();
    stopped.begin_turn();
    home.idle();
    assert!(matches!(home.node.answer(), Some((_, Ok(Answer::Done)))));
    home.store = home.create("t", 5);
    let (writer, reader) = (home.client(), home.client());
    writer.begin_turn();
    let at = writer.take();
    assert_eq!(at, old, "the next store has the same memory");
    writer.install(0, at);
    reader.begin_turn(); // From here on the reader may hold the slot's pointer.
    writer.install(0, 0);
    writer.begin_to_retire(at);
    home.kill(&writer);
    home.idle();
    stopped.end_turn();
    home.idle();
    assert_eq!(home.stage(at), Stage::Retired, "the reader may hold a pointer to it");
    reader.end_turn();
    home.idle();
    assert_eq!(home.stage(at), Stage::Free);
}

pub(crate) fn a_fenced_nonce_is_refused_until_its_store_is_dropped() {
    let mut home = Home::of(32, 5);
    let (client, reopened) = (home.client(), home.client());
    let [client, reopened] = [client.id, reopened.id].map(Sender::Slot);
    assert_eq!(
        [home.bind(client, 5), home.bind(client, 5), home.bind(reopened, 6)],
        const { [const { Ok(Answer::Done) }; 3] }
    );
    let another = home.bind(client, 7).expect_err("it has a nonce");
    assert!(another.contains("client 5") && another.contains("open another session"), "{another}");
    assert_eq!(home.fence(5), Some(Ok(Answer::Done)), "the client is in no turn");
    assert_eq!(home.fence(5), Some(Ok(Answer::Done)), "a repeated fence does no harm");
    let list = home.ask_from(client, Ask::ListStores).expect("an answer").expect_err("the session is fenced");
    assert!(list.starts_with(FENCED), "{list}");
    assert_eq!(home.ask_from(reopened, Ask::NodeInfo).map(|answer| answer.is_ok()), Some(true));
    let fresh = Sender::Slot(home.client().id);
    let refused = home.bind(fresh, 5).expect_err("the nonce was fenced");
    assert!(refused.starts_with(FENCED) && refused.contains("new nonce"), "{refused}");
    assert_eq!(home.bind(fresh, 8), Ok(Answer::Done));
    assert_eq!(home.ask(Ask::DropStore { name: "s".into() }), Some(Answer::Done));
    assert!(home.bind(fresh, 5).expect_err("the store is gone").contains("no store 's'"));
    home.store = home.create("s", 5);
    assert_eq!(home.bind(fresh, 5), Ok(Answer::Done), "another store");
}

pub(crate) fn a_fence_waits_for_turns_and_names_a_stopped_process() {
    let mut home = Home::new();
    let (stopped, other) = (home.client(), home.client());
    for client in [&stopped, &other] {
        assert_eq!(home.bind(Sender::Slot(client.id), 5), Ok(Answer::Done));
        client.begin_turn();
    }
    assert_eq!(home.fence(5), None, "both may be running chains");
    let fenced = |client: &super::Client| {
        let Ok(fenced) = Arena::of(&*home.memory).is_fenced(client.id.slot);
        fenced
    };
    assert!(fenced(&stopped) && fenced(&other), "they see it when they begin their next turns");
    other.end_turn();
    other.begin_turn();
    home.idle();
    assert_eq!((home.node.answer(), home.node.delayed_by()), (None, vec![stopped.pid]));
    home.node.report_stopped(&[stopped.pid]);
    let (_, delayed) = home.node.answer().expect("the response names the process");
    let delayed = delayed.expect_err("the process may yet complete its chain");
    assert!(delayed.contains(&format!("process {} is stopped", stopped.pid)), "{delayed}");
    assert_eq!(home.fence(5), None, "a repeated fence waits again");
    stopped.end_turn();
    home.idle();
    assert!(matches!(home.node.answer(), Some((_, Ok(Answer::Done)))));
    assert_eq!(home.node.answer(), None);
}

pub(crate) fn a_fence_ends_a_clients_sessions_at_every_engine() {
    let mut home = Home::new();
    let sessions = [0, 1, 1, 0].map(|engine| {
        let Ok(number) = home.node.open_remote(&home.memory);
        (engine, number)
    });
    let remote = |(engine, number)| Sender::Remote { engine, number };
    for session in &sessions[..3] {
        assert_eq!(home.bind(remote(*session), 5), Ok(Answer::Done));
    }
    assert_eq!(home.bind(remote(sessions[3]), 6), Ok(Answer::Done));
    assert_eq!(home.fence(5), None, "the engines have not ended the sessions yet");
    let mut ended: Vec<_> = std::iter::from_fn(|| home.node.ending()).collect();
    ended.sort_unstable_by_key(|&(_, number)| number);
    assert_eq!(ended, sessions[..3]);
    for (_, number) in ended {
        assert_eq!(home.node.answer(), None);
        home.node.end_remote(number, false);
        home.idle();
    }
    assert!(matches!(home.node.answer(), Some((_, Ok(Answer::Done)))));
    assert_eq!(home.ask_from(remote(sessions[3]), Ask::ListStores).map(|answer| answer.is_ok()), Some(true));
}

/// Replaces a buffer in slot 0 of the store, in a chain that retires it. Returns the buffer.
fn replaced(home: &mut Home) -> u64 {
    let writer = home.client();
    let old = writer.in_turn(|client| client.take());
    writer.install(0, old);
    writer.in_turn(|client| {
        let new = client.take();
        client.install(0, new);
        assert!(client.retire(old));
    });
    home.part(&writer);
    old
}

pub(crate) fn a_buffer_waits_for_two_epochs_of_each_client() {
    let mut home = Home::leased(20);
    for (index, nonce, epoch) in [(0, 7, 5), (3, 11, 0), (4, 13, u64::MAX - 5), (19, 9, 1)] {
        home.lease(index, nonce, epoch);
    }
    let old = replaced(&mut home);
    home.poll_shared();
    home.poll_shared();
    assert_eq!(home.stage(old), Stage::Retired, "four clients may have its address");
    assert_eq!(home.stat().delaying_ids, [20]);
    assert!(home.node.delayed_by().is_empty());
    // A client that claims its id later did not run yet. One leaves, one is fenced, one advances twice.
    home.lease(8, 15, 0);
    home.lease(4, 14, u64::MAX - 5);
    assert_eq!(home.fence(11), Some(Ok(Answer::Done)));
    home.lease(19, 9, 3);
    home.lease(0, 7, 6);
    home.poll_shared();
    home.poll_shared();
    assert_eq!(home.stage(old), Stage::Retired, "client 1 may run an operation of its epoch 5");
    assert_eq!(home.stat().delaying_ids, [1]);
    home.lease(0, 7, 7);
    home.poll_shared();
    assert_eq!(home.stage(old), Stage::Free, "no operation of any client has its address");
    assert!(home.stat().delaying_ids.is_empty());
}

pub(crate) fn a_leaked_buffer_waits_for_the_epochs_of_clients() {
    let mut home = Home::leased(1);
    let client = home.client();
    let old = client.in_turn(|client| client.take());
    client.install(0, old);
    home.scan().expect("the scan ends");
    home.lease(0, 7, 1);
    client.begin_turn();
    let new = client.take();
    assert_eq!(client.install(0, new), old);
    home.kill(&client);
    home.idle();
    assert_eq!(home.stage(old), Stage::Retired, "the other client may have read its address before");
    home.lease(0, 7, 2);
    home.poll_shared();
    assert_eq!(home.stage(old), Stage::Retired);
    home.lease(0, 7, 3);
    home.poll_shared();
    assert_eq!(home.stage(old), Stage::Free);
}

pub(crate) fn a_drop_waits_for_no_epoch() {
    let mut home = Home::leased(9);
    home.lease(2, 7, 1);
    let before = home.node.info().unassigned_bytes;
    let old = replaced(&mut home);
    home.poll_shared();
    assert_eq!(home.stage(old), Stage::Retired);
    assert_eq!(home.ask(Ask::DropStore { name: "s".into() }), Some(Answer::Done));
    home.store = home.create("s", 5);
    assert_eq!(home.node.info().unassigned_bytes, before);
    let old = replaced(&mut home);
    home.poll_shared();
    assert_eq!(home.stage(old), Stage::Free, "the new store has no client");
}

pub(crate) fn sessions_reuse_no_buffer_while_a_scan_adopts_it() {
    let mut home = Home::reusing(16, 5);
    let client = home.client();
    let first = client.in_turn(|client| {
        let installed: Vec<u64> = (0..14).map(|_| client.take()).collect();
        installed.iter().zip(0..).for_each(|(&at, slot)| assert_eq!(client.install(slot, at), 0));
        installed[0]
    });
    let _scan = home.node.ask(Ask::Scan { name: "s".into() }, [1, 1]);
    while home.kind.looks.load(Ordering::Relaxed) == 0 {
        assert_eq!(home.step(), Progress::Made);
    }
    // The scan has seen the first buffer in its slot. The client replaces it, and takes another one to install later.
    client.in_turn(|client| {
        let new = client.take();
        assert_eq!(client.install(0, new), first);
        assert!(client.retire(first));
    });
    let again = client.retake_in_turns();
    let held = again.unwrap_or_else(|| client.in_turn(Client::take));
    home.idle();
    assert!(matches!(home.node.answer(), Some((_, Ok(Answer::Done)))));
    home.scan().expect("the scan ends");
    home.poll_shared();
    assert_eq!(home.stage(held), Stage::Live, "its owner may yet install it");
    assert_eq!(again, None, "the scan had seen it");
    assert_eq!(home.stage(first), Stage::Free, "the node reclaims what sessions do not keep");
    client.reuse_one().expect("sessions reuse buffers again");
}

pub(crate) fn a_rebuild_reads_no_item_that_a_session_may_reuse() {
    let mut home = Home::reusing(16, 5);
    let (stopped, client) = (home.client(), home.client());
    client.reuse_one().expect("sessions reuse buffers");
    stopped.begin_turn();
    let ask = Ask::RebuildStore { name: "s".into(), parameters: "{}".into() };
    assert!(home.ask(ask).is_none(), "a session in a turn may have begun to reuse a buffer");
    assert_eq!(home.kind.surveyed.load(Ordering::Relaxed), 0);
    assert_eq!(home.node.delayed_by(), [stopped.pid]);
    assert_eq!(client.reuse_one(), None, "a later turn reuses none");
    stopped.end_turn();
    home.poll_shared();
    let (_, reported) = home.node.answer().expect("the rebuild ends");
    assert!(reported.expect_err("the table is large enough").contains("not crowded"));
    assert_eq!(home.kind.surveyed.load(Ordering::Relaxed), 32);
    home.poll_shared();
    client.reuse_one().expect("sessions reuse buffers again");
}

/// A client's memory. Something happens before one of its accesses, after which the client may be dead.
struct Struck<'a> {
    client: &'a Client,
    /// Number of accesses before that moment.
    left: Cell<u64>,
    event: RefCell<Option<Box<dyn FnOnce() + 'a>>>,
    dies: bool,
}

#[derive(Debug)]
struct Died;

impl Struck<'_> {
    fn step(&self) -> Result<(), Died> {
        if self.left.get() > 0 {
            self.left.set(self.left.get() - 1);
        } else if let Some(event) = self.event.take() {
            event();
            if self.dies {
                return Err(Died);
            }
        }
        Ok(())
    }
}

fn completed<T>(done: Result<T, std::convert::Infallible>) -> Result<T, Died> {
    let Ok(done) = done;
    Ok(done)
}

impl Memory for Struck<'_> {
    type Wait = Died;

    fn geometry(&self) -> Geometry {
        self.client.memory.geometry()
    }
    fn admits(&self, key: Key) -> Result<Rights, Died> {
        Arena::of(self).admits(key)
    }
    fn reach(&self, region: u32, at: u64, len: u64) -> Result<u64, Died> {
        Arena::of(self).reach(region, at, len)
    }
    fn read(&self, at: u64, out: &mut [u8]) -> Result<(), Died> {
        self.step()?;
        completed(self.client.memory.read(at, out))
    }
    fn write(&self, at: u64, bytes: &[u8]) -> Result<(), Died> {
        self.step()?;
        completed(self.client.memory.write(at, bytes))
    }
    fn load(&self, at: u64, width: Width) -> Result<u128, Died> {
        self.step()?;
        completed(self.client.memory.load(at, width))
    }
    fn exchange(&self, at: u64, width: Width, old: u128, new: u128) -> Result<Result<(), u128>, Died> {
        self.step()?;
        completed(self.client.memory.exchange(at, width, old, new))
    }
}

/// The buffers on the lists of the session in `slot`, and whatever else these lists lead to.
fn listed(home: &Home, slot: u32) -> Vec<u64> {
    let mut all = Vec::new();
    for list in Retirees::ALL {
        let Ok(head) = home.memory.load(list_at(slot, list), Width::W8);
        let mut next = head as u64 & ((1 << 48) - 1);
        while next != 0 && all.len() < 1000 {
            all.push(next);
            let Ok(found) = Arena::of(&*home.memory).buffer_at(next);
            next = found.map_or(0, |_| home.state(next).next);
        }
    }
    all
}

/// A node with two stores, of which `other` will be dropped, and sessions of which two keep buffers of both.
struct Dropping {
    home: Home,
    moving: Client,
    idle: Client,
    late: Client,
    /// The kept buffers of the other store.
    kept: Vec<u64>,
    /// The segments of the store that is to be dropped.
    segments: BTreeSet<u32>,
}

impl Dropping {
    fn new() -> Dropping {
        let mut home = Home::reusing(24, 5);
        let other = home.create("other", 4);
        (0..3).for_each(|_| home.poll_shared());
        let [mut moving, mut idle, late] = [(); 3].map(|()| home.client());
        let kept_store = home.store.clone();
        let mut kept = Vec::new();
        for client in [&mut moving, &mut idle] {
            for _ in 0..2 {
                client.store = kept_store.clone();
                let own = client.in_turn(|client| client.take());
                client.store = other.clone();
                let dropped = client.in_turn(|client| client.take());
                client.in_turn(|client| {
                    assert_eq!(client.retire_to(dropped), Some(Retirees::Gathering), "sessions reuse it");
                    client.store_of(&kept_store, |client| {
                        assert_eq!(client.retire_to(own), Some(Retirees::Gathering));
                    });
                    // The first pair now waits; the second one is gathered.
                    assert_eq!(client.retake(), None);
                });
                kept.push(own);
            }
        }
        // Both sessions have advanced the epoch: when the first one takes a buffer again, all its buffers move.
        moving.store = kept_store;
        let entry = home.node.catalog().get("other").expect("a store");
        let segments = entry.segments.iter().copied().collect();
        Dropping { home, moving, idle, late, kept, segments }
    }

    /// Checks that no list leads to the dropped store's memory, and that the node gets all kept buffers but `held`.
    fn check(mut self, held: Option<u64>, when: &str) {
        let geometry = self.home.memory.geometry();
        let is_dropped =
            |at: &u64| geometry.segment_of(*at).is_some_and(|index| self.segments.contains(&index));
        for slot in 0..3 {
            let listed = listed(&self.home, slot);
            assert!(!listed.iter().any(is_dropped), "session {slot} lists a dropped store's buffer, {when}");
        }
        self.home.part(&self.idle);
        self.home.part(&self.moving);
        self.home.idle();
        self.home.poll_shared();
        for at in self.kept {
            let expected = if Some(at) == held { Stage::Live } else { Stage::Free };
            assert_eq!(self.home.stage(at), expected, "{at:#x}, {when}");
        }
    }
}

/// A store is dropped while a session moves its buffers from list to list. The drop takes the lists before this
/// session's access number `moment`, before which the session is stopped, or dies. Returns false if the session makes
/// fewer accesses.
fn drop_while_buffers_move(moment: u64, dies: bool) -> bool {
    let mut dropping = Dropping::new();
    let Dropping { home, moving, late, kept, .. } = &mut dropping;
    // The store's key is revoked, and only then a turn begins that the drop has not to wait for.
    late.begin_turn();
    assert!(home.ask(Ask::DropStore { name: "other".into() }).is_none(), "a client is in a turn");
    moving.begin_turn();
    late.end_turn();
    let has_struck = Cell::new(false);
    let retaken = {
        let (home, has_struck, moving) = (RefCell::new(&mut *home), &has_struck, &*moving);
        let event: Box<dyn FnOnce()> = Box::new(move || {
            has_struck.set(true);
            let home = &mut *home.borrow_mut();
            if dies {
                home.kill(moving);
            }
            home.idle();
            assert_eq!(
                home.node.answer().is_some(),
                dies,
                "a session may be moving the dropped store's buffers"
            );
            assert_eq!(home.node.delayed_by(), if dies { vec![] } else { vec![moving.pid] });
        });
        let (left, event) = (Cell::new(moment), RefCell::new(Some(event)));
        let memory = Struck { client: moving, left, event, dies };
        Arena::of(&memory).reuse(By::itself(moving.id), moving.store.region, class(LARGE))
    };
    if !has_struck.get() {
        assert_eq!(retaken.expect("it lives"), Some(kept[0]));
        return false;
    }
    let held = retaken.ok().flatten();
    if !dies {
        moving.end_turn();
        home.idle();
        assert_eq!(home.node.answer().map(|(_, answer)| answer), Some(Ok(Answer::Done)));
        let owners = held.map(|at| (home.stage(at), home.state(at).owner));
        assert!(owners.is_none_or(|owners| owners == (Stage::Live, moving.id.number)));
    }
    dropping.check(held, &format!("moment {moment}"));
    true
}

pub(crate) fn a_dropped_stores_buffers_leave_the_lists_of_sessions_that_reuse_them() {
    let moments = (0..).find(|&moment| !drop_while_buffers_move(moment, false)).expect("it ends");
    assert!(moments > 10, "stopped before each of {moments} accesses");
}

pub(crate) fn a_session_that_dies_while_it_moves_buffers_loses_none() {
    let moments = (0..).find(|&moment| !drop_while_buffers_move(moment, true)).expect("it ends");
    assert!(moments > 10, "died before each of {moments} accesses");
}

/// The session moves all its buffers between two of the node's steps.
pub(crate) fn a_drop_finds_the_buffers_that_move_while_it_takes_lists() {
    let mut steps = 0;
    loop {
        let mut dropping = Dropping::new();
        let Dropping { home, moving, .. } = &mut dropping;
        home.node.ask(Ask::DropStore { name: "other".into() }, [1, 1]);
        if (0..steps).any(|_| home.step() == Progress::Idle) {
            break;
        }
        let held = moving.in_turn(Client::retake);
        home.idle();
        assert_eq!(home.node.answer().map(|(_, answer)| answer), Some(Ok(Answer::Done)));
        dropping.check(held, &format!("after {steps} steps"));
        steps += 1;
    }
    assert!(steps > 100, "after each of {steps} steps");
}

pub(crate) fn a_session_keeps_no_buffer_that_another_needs() {
    // The store has one segment for buffers.
    let mut home = Home::reusing(16, 2);
    let (idle, client) = (home.client(), home.client());
    let kept = idle.in_turn(|idle| {
        let kept = [(); 4].map(|()| idle.take());
        kept.iter().for_each(|&at| assert_eq!(idle.retire_to(at), Some(Retirees::Gathering)));
        kept
    });
    let taken: Vec<u64> = client.in_turn(|client| std::iter::from_fn(|| client.try_take()).collect());
    assert_eq!(taken.len() + kept.len(), class(LARGE).count as usize, "the others are kept");
    home.poll_shared();
    let none = client.in_turn(|client| client.try_take());
    assert_eq!(none, None, "while no chain needs them, the session keeps its buffers");
    // What a chain does that finds no free buffer.
    let Ok(()) = home.memory.write(header::NEEDED_AT, &[1; 8]);
    home.poll_shared();
    let more: BTreeSet<u64> = client.in_turn(|client| std::iter::from_fn(|| client.try_take()).collect());
    assert_eq!(more, BTreeSet::from(kept), "the node has taken them from the idle session");
}

pub(crate) fn a_dead_session_delays_reuse_until_it_is_closed() {
    let mut home = Home::reusing(16, 5);
    let (dead, client) = (home.client(), home.client());
    dead.begin_turn();
    assert_eq!(client.reuse_one(), None, "the other session may have a pointer to it");
    home.kill(&dead);
    assert_eq!(client.retake_in_turns(), None, "the node has not closed the session yet");
    home.idle();
    home.poll_shared();
    assert!(client.retake_in_turns().is_some(), "no chain runs in the closed session");
}

pub(crate) fn a_node_that_takes_over_ends_reuse_and_begins_it_again() {
    let mut home = Home::reusing(16, 5);
    let client = home.client();
    let kept = client.in_turn(|client| {
        let kept = client.take();
        assert_eq!(client.retire_to(kept), Some(Retirees::Gathering));
        kept
    });
    client.begin_turn();
    home.succeed();
    let client = home.client();
    let other = client.in_turn(|client| {
        let other = client.take();
        assert_eq!(client.retire_to(other), Some(Retirees::Node), "the node scans the store first");
        other
    });
    home.idle();
    home.poll_shared();
    home.poll_shared();
    assert_eq!((home.stage(kept), home.stage(other)), (Stage::Free, Stage::Free));
    client.reuse_one().expect("sessions reuse buffers again, and no former session's turn delays them");
}

pub(crate) fn a_damaged_list_of_reused_buffers_is_cut_there() {
    for list in Retirees::ALL {
        for wild in [u64::MAX >> 16 & !15, 8, 4096 + 3, 1, 1 << 40, u64::MAX] {
            let mut home = Home::reusing(16, 5);
            let client = home.client();
            let at: [u64; 3] = client.in_turn(|client| [(); 3].map(|()| client.take()));
            client.in_turn(|client| at.iter().for_each(|&at| assert!(client.retire(at))));
            client.damage_list_of(list, wild);
            home.damage_state(at[1], |state| State { next: wild & !(u64::MAX << 48), ..state });
            client.retake_in_turns();
            let Some(Answer::Done) = home.ask(Ask::DropStore { name: "s".into() }) else { panic!("dropped") };
            home.poll_shared();
            home.kill(&client);
            home.idle();
            assert!(home.node.sessions().is_empty());
        }
    }
}
