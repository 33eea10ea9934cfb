//! The fate of buffers when clients die, stop, make errors or corrupt memory. The tests step the node by hand.

use crate::support::{self, Home};
use farside_node::identity::{FENCED_MAX, Sender};
use farside_remote::control::{Answer, Ask};
use farside_remote::fabric::FENCED;
use std::collections::BTreeSet;

macro_rules! tests {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            support::cases::$name();
        })*
    };
}
support::cases::with_all_cases!(tests);

// Tests of requests that wait for one another.

fn drop_store(name: &str) -> Ask {
    Ask::DropStore { name: name.into() }
}

fn stat(name: &str) -> Ask {
    Ask::StoreStat { name: name.into() }
}

#[test]
fn a_store_is_wide_if_its_kind_planned_it_so() {
    let mut home = Home::of(32, 5);
    for (name, parameters, wide) in [("narrow", "32", false), ("wide", "+32", true)] {
        let (name, kind) = (name.to_owned(), "slots".to_owned());
        let create =
            Ask::CreateStore { name: name.clone(), kind, parameters: parameters.into(), quota: 2 << 20 };
        for ask in [create, Ask::OpenStore { name }] {
            let Some(Answer::Store(store)) = home.ask(ask) else { panic!("a store") };
            assert_eq!(store.wide, wide, "{store:?}");
        }
    }
}

#[test]
fn a_stopped_client_delays_only_the_jobs_that_wait_for_it() {
    let mut home = Home::of(32, 5);
    let (stopped, other) = (home.client(), home.client());
    home.create("t", 2);
    home.create("u", 2);
    stopped.begin_turn();
    assert!(home.ask(drop_store("s")).is_none(), "a client is in a turn");
    assert!(home.ask(drop_store("t")).is_none(), "a client is in a turn");
    home.create("v", 2);
    let Some(Answer::StoreStat(reported)) = home.ask(stat("v")) else { panic!("figures") };
    assert_eq!(reported.delaying_pids, [stopped.pid]);
    assert_eq!(
        home.ask(Ask::ListStores).map(|answer| matches!(answer, Answer::Stores(all) if all.len() == 2)),
        Some(true)
    );
    // The drop of a store waits only for the turns that were in progress when the drop began.
    other.in_turn(|_| ());
    stopped.end_turn();
    stopped.begin_turn();
    home.idle();
    for _ in 0..2 {
        assert!(matches!(home.node.answer(), Some((_, Ok(Answer::Done)))), "both are dropped");
    }
    stopped.end_turn();
    assert_eq!(home.ask(drop_store("u")), Some(Answer::Done));
    // All the memory is free again.
    home.create("s", 5);
    home.create("t", 2);
    home.create("u", 2);
}

#[test]
fn drops_that_wait_concurrently_go_idle_and_complete() {
    let mut home = Home::of(64, 2);
    let stopped = home.client();
    let names: Vec<String> = (0..15).map(|n| format!("t{n}")).collect();
    names.iter().for_each(|name| drop(home.create(name, 2)));
    stopped.begin_turn();
    names.iter().for_each(|name| assert!(home.ask(drop_store(name)).is_none(), "{name}"));
    home.poll_shared();
    stopped.end_turn();
    home.idle();
    let done = std::iter::from_fn(|| home.node.answer()).filter(|(_, answer)| *answer == Ok(Answer::Done));
    assert_eq!(done.count(), names.len());
}

#[test]
fn too_many_outstanding_requests_are_refused() {
    let mut home = Home::new();
    let client = home.client();
    client.begin_turn();
    let mut tickets = BTreeSet::new();
    for _ in 0..10_000 {
        tickets.insert(home.node.ask(stat("s"), [1, 1]));
        tickets.insert(home.node.ask(Ask::Scan { name: "s".into() }, [1, 1]));
    }
    let refused: Vec<_> = std::iter::from_fn(|| home.node.answer()).collect();
    assert!(refused.len() > 10_000, "{} of 20000 were refused", refused.len());
    for (_, refusal) in &refused {
        assert!(refusal.as_ref().is_err_and(|reason| reason.contains("retry later")), "{refusal:?}");
    }
    // Requests that change something are limited separately.
    home.node.ask(drop_store("s"), [1, 1]);
    assert!(home.node.answer().is_none(), "it is in progress");
    // The clients are gone: they get no responses, and the node has no work for them any more.
    home.node.cancel(&tickets);
    client.end_turn();
    home.idle();
    let answers: Vec<_> = std::iter::from_fn(|| home.node.answer()).collect();
    assert!(matches!(answers[..], [(_, Ok(Answer::Done))]), "only the drop has a response: {answers:?}");
}

#[test]
fn statistics_of_a_store_that_is_dropped_meanwhile_fail() {
    let mut home = Home::new();
    let look = home.node.ask(stat("s"), [1, 1]);
    home.step();
    home.node.ask(drop_store("s"), [1, 1]);
    home.idle();
    let answers: Vec<_> = std::iter::from_fn(|| home.node.answer()).collect();
    let (_, reported) = answers.iter().find(|(to, _)| *to == look).expect("an answer");
    assert!(reported.as_ref().is_err_and(|reason| reason.contains("was dropped")), "{reported:?}");
    // The responses contain no figures of a later store with the same name.
    assert_eq!(answers.len(), 2);
}

#[test]
fn statistics_count_the_completed_scans_of_one_store() {
    let mut home = Home::of(32, 5);
    home.create("t", 2);
    let scans = |home: &mut Home, name: &str| {
        let Some(Answer::StoreStat(reported)) = home.ask(stat(name)) else { panic!("figures") };
        reported.scans
    };
    assert_eq!((scans(&mut home, "s"), scans(&mut home, "t")), (0, 0));
    home.scan().expect("the scan ends");
    assert_eq!((scans(&mut home, "s"), scans(&mut home, "t")), (1, 0));
    // A death leads to a scan of every store.
    let (dead, stopped) = (home.client(), home.client());
    home.kill(&dead);
    home.idle();
    assert_eq!((scans(&mut home, "s"), scans(&mut home, "t")), (2, 1));
    // A scan that waits for a client is not complete.
    stopped.begin_turn();
    let ticket = home.node.ask(Ask::Scan { name: "s".into() }, [1, 1]);
    home.idle();
    assert_eq!(scans(&mut home, "s"), 2);
    stopped.end_turn();
    home.idle();
    assert_eq!(home.node.answer(), Some((ticket, Ok(Answer::Done))));
    assert_eq!((scans(&mut home, "s"), scans(&mut home, "t")), (3, 1));
    // A later store of the same name has its own count.
    assert_eq!(home.ask(drop_store("t")), Some(Answer::Done));
    home.create("t", 2);
    assert_eq!((scans(&mut home, "s"), scans(&mut home, "t")), (3, 0));
}

#[test]
fn stores_created_concurrently_must_fit_the_catalog_together() {
    let mut home = Home::of(300, 2);
    let mut refused = 0;
    for n in 0..200 {
        let (name, kind) = (format!("t{n}"), "slots".into());
        // A number in the parameters may have any number of leading zeros.
        let parameters = format!("{}32", "0".repeat(4000));
        home.node.ask(Ask::CreateStore { name, kind, parameters, quota: 2 << 20 }, [1, 1]);
    }
    home.idle();
    for (_, answer) in std::iter::from_fn(|| home.node.answer()) {
        match answer {
            Ok(answer) => assert!(matches!(answer, Answer::Store(_))),
            Err(reason) => {
                assert!(reason.contains("the catalog is full"), "{reason}");
                refused += 1;
            }
        }
    }
    assert!(refused > 0, "the catalog cannot hold all stores");
}

#[test]
fn a_node_that_takes_over_refuses_fenced_nonces() {
    let mut home = Home::new();
    let client = Sender::Slot(home.client().id);
    assert_eq!((home.bind(client, 5), home.bind(client, 5)), (Ok(Answer::Done), Ok(Answer::Done)));
    assert_eq!((home.fence(5), home.fence(u64::MAX)), (Some(Ok(Answer::Done)), Some(Ok(Answer::Done))));
    home.succeed();
    assert!(home.bind(client, 7).expect_err("the session is over").contains("has ended"));
    let client = Sender::Slot(home.client().id);
    for nonce in [5, u64::MAX] {
        assert!(home.bind(client, nonce).expect_err("it was fenced").starts_with(FENCED));
    }
    assert_eq!(home.bind(client, 7), Ok(Answer::Done));
    let Some(Answer::Store(store)) = home.ask(Ask::OpenStore { name: "s".into() }) else { panic!("a store") };
    assert_eq!(store, home.store, "clients see no nonces");
}

#[test]
fn a_store_remembers_a_bounded_number_of_fenced_clients() {
    let mut home = Home::new();
    for nonce in 1..FENCED_MAX as u64 {
        assert_eq!(home.fence(u64::MAX - nonce), Some(Ok(Answer::Done)));
    }
    // Three fences at the same time, and room for one.
    for more in 0..3 {
        let (name, id, nonce) = ("s".to_owned(), home.store.id, u64::MAX / 2 - more);
        home.node.ask(Ask::Fence { name, id, nonce }, [1, 1]);
    }
    home.idle();
    let answers: Vec<_> = std::iter::from_fn(|| home.node.answer()).map(|(_, answer)| answer).collect();
    assert_eq!(answers.iter().filter(|answer| answer.is_ok()).count(), 1, "{answers:?}");
    let refused = home.fence(1).expect("an answer").expect_err("the list is full");
    assert!(refused.contains("drop this one"), "{refused}");
    assert_eq!(home.fence(u64::MAX - 1), Some(Ok(Answer::Done)), "a repeated fence needs no room");
    let client = Sender::Slot(home.client().id);
    assert_eq!(home.bind(client, 1), Ok(Answer::Done), "it was not fenced");
    for (id, nonce) in [(home.store.id, 0), (home.store.id + 1, 7)] {
        let name = "s".to_owned();
        let ask = Ask::Fence { name, id, nonce };
        assert!(home.ask_from(client, ask).is_some_and(|answer| answer.is_err()), "{id} {nonce}");
    }
    assert!(home.bind(Sender::Host, 9).expect_err("no session").contains("over a fabric"));
}
