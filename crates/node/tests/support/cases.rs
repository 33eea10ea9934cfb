//! Scenarios of buffers' lifecycles, made step by step.
//!
//! The scenarios are functions, so that they also run against the mutants.

use super::{Home, LARGE, MEDIUM, class};
use farside_node::Progress;
use farside_node::identity::Sender;
use farside_remote::Memory;
use farside_remote::arena::Arena;
use farside_remote::arena::state::{Stage, State, owner};
use farside_remote::control::{Answer, Ask};
use farside_remote::fabric::FENCED;
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
