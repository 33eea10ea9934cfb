//! Tests of PRISM-KV when another client's operation runs between the two round trips of an operation.

use crate::support::{Client, Home, Intercepted, run};
use farside_fabrics::executor::block_on;
use farside_systems::kv::Kv;
use std::rc::Rc;

/// Creates a store that has the value `old` for the key `k`, a client whose chains can be delayed, and a client that
/// acts meanwhile.
fn scene(home: &Home) -> (Intercepted, Client) {
    home.create("s", 32, r#"{"items": 1000}"#);
    let mut intercepted = home.intercepted("s");
    let fabric = Rc::clone(intercepted.fabric());
    block_on(fabric.inner().inner(), intercepted.put(b"k", b"old")).expect("stored");
    (intercepted, home.client("s"))
}

/// Runs an operation of the delayed client, with `act` between the operation's first and second chain.
macro_rules! between {
    ($client:expr, $op:ident($($arg:expr),*), $act:expr) => {{
        let fabric = Rc::clone($client.fabric());
        fabric.before_chain(1, $act);
        block_on(fabric.inner().inner(), $client.$op($($arg),*))
    }};
}

fn get(client: &mut Intercepted) -> Option<Vec<u8>> {
    let fabric = Rc::clone(client.fabric());
    block_on(fabric.inner().inner(), client.get(b"k")).expect("read").map(|item| item.value.to_vec())
}

macro_rules! other {
    ($client:ident . $op:ident($($arg:expr),*)) => {{
        let endpoint = Rc::clone($client.fabric());
        run(&endpoint, $client.$op($($arg),*)).expect("no chain of this client is delayed")
    }};
}

#[test]
fn a_put_that_loses_to_a_blind_put_counts_as_done_before_it() {
    let home = Home::new(64);
    let (mut mine, mut theirs) = scene(&home);
    between!(mine, put(b"k", b"mine"), move || other!(theirs.put(b"k", b"theirs"))).expect("stored");
    assert_eq!(get(&mut mine).as_deref(), Some(&b"theirs"[..]));
}

#[test]
fn a_put_that_loses_to_a_conditional_put_is_done_after_it() {
    let home = Home::new(64);
    let (mut mine, mut theirs) = scene(&home);
    let act = move || {
        let version = {
            let endpoint = Rc::clone(theirs.fabric());
            run(&endpoint, theirs.get(b"k")).expect("read").expect("present").version
        };
        // This put saw `old`, so no put can have come between.
        other!(theirs.compare_and_put(b"k", version, b"theirs")).expect("unchanged since");
    };
    between!(mine, put(b"k", b"mine"), act).expect("stored");
    assert_eq!(get(&mut mine).as_deref(), Some(&b"mine"[..]));
}

#[test]
fn a_put_that_loses_to_a_delete_is_done_after_it() {
    let home = Home::new(64);
    let (mut mine, mut theirs) = scene(&home);
    between!(mine, put(b"k", b"mine"), move || assert!(other!(theirs.delete(b"k")))).expect("stored");
    assert_eq!(get(&mut mine).as_deref(), Some(&b"mine"[..]));
}

#[test]
fn a_delete_that_loses_to_a_put_deletes_the_new_value() {
    let home = Home::new(64);
    let (mut mine, mut theirs) = scene(&home);
    let deleted = between!(mine, delete(b"k"), move || other!(theirs.put(b"k", b"theirs")));
    assert_eq!(deleted, Ok(true));
    // The delete must not count as done before the put. Otherwise a second delete that lost its CAS, too, could count
    // as done in the same way, and both would have deleted the same value.
    assert_eq!(get(&mut mine), None);
}

#[test]
fn a_delete_that_loses_to_a_delete_finds_nothing() {
    let home = Home::new(64);
    let (mut mine, mut theirs) = scene(&home);
    let deleted = between!(mine, delete(b"k"), move || assert!(other!(theirs.delete(b"k"))));
    assert_eq!(deleted, Ok(false));
}

#[test]
fn a_put_if_absent_that_loses_is_refused() {
    let home = Home::new(64);
    let (mut mine, mut theirs) = scene(&home);
    block_on(mine.fabric().inner().inner(), theirs.delete(b"k")).expect("deleted");
    let stored = between!(mine, put_if_absent(b"k", b"mine"), move || other!(theirs.put(b"k", b"theirs")));
    assert_eq!(stored, Ok(false));
    assert_eq!(get(&mut mine).as_deref(), Some(&b"theirs"[..]));
}

#[test]
fn a_small_put_over_a_large_value_frees_all_its_parts() {
    let home = Home::new(64);
    let (mine, mut theirs) = scene(&home);
    let mut cached = home.client("s").with_slot_cache(10);
    other!(theirs.put(b"k", &vec![1; 1 << 20]));
    let read = other!(cached.get(b"k")).expect("present").value.len();
    assert_eq!(read, 1 << 20);
    other!(cached.put(b"k", b"small"));
    drop((mine, theirs, cached));
    assert_eq!(home.settled("s").live_buffers, 1);
}
