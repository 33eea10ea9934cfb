//! Tests of PRISM-KV when a put is cancelled: the put's future is dropped before it is ready.

use crate::support::intercept::{Intercept, Then};
use crate::support::{Home, Intercepted};
use farside_fabrics::direct::Direct;
use farside_fabrics::executor::block_on;
use farside_fabrics::layer::count::Count;
use farside_remote::control::{Answer, Ask};
use farside_systems::kv::prism_kv::layout::PART_MAX;
use farside_systems::kv::{Kv, KvError};
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

/// Creates a store that has the value `old` for the key `k`, and a client whose chains can be stopped.
fn scene(home: &Home, mib: u64) -> (Intercepted, Rc<Intercept<'static, Rc<Count<Direct>>>>) {
    home.create("s", mib, r#"{"items": 1000}"#);
    let mut client = home.intercepted("s");
    let fabric = Rc::clone(client.fabric());
    block_on(fabric.inner().inner(), client.put(b"k", b"old")).expect("stored");
    (client, fabric)
}

/// Polls an operation once, checks that it is not ready, and drops it.
fn begin<O>(fabric: &Intercept<Rc<Count<Direct>>>, operation: impl Future<Output = O>) {
    {
        let mut operation = pin!(operation);
        let polled = operation.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(matches!(polled, Poll::Pending), "the operation waits");
    }
    block_on(fabric.inner().inner(), async {});
}

/// Number of parts of the value. A put sends one chain for each part, then the probe, then the install of the head.
const PARTS: u32 = 3;

#[test]
fn the_parts_of_a_cancelled_put_are_freed() {
    let home = Home::new(64);
    let (mut client, fabric) = scene(&home, 32);
    let value = vec![1; PARTS as usize * PART_MAX];
    for chains in 0..=PARTS {
        fabric.of_chain(chains, Then::Stops);
        begin(&fabric, client.put(b"k", &value));
        assert_eq!(home.settled("s").live_buffers, 1, "a put stopped before chain {chains}");
        fabric.of_chain(chains, Then::Stops);
        begin(&fabric, client.put_if_absent(b"l", &value));
        assert_eq!(home.settled("s").live_buffers, 1, "a conditional put stopped before chain {chains}");
    }
    // The parts are freed even if the cancelled chain is the one that installs the head, because it was never posted.
    fabric.of_chain(PARTS + 1, Then::Stops);
    begin(&fabric, client.put(b"k", &value));
    assert_eq!(home.settled("s").live_buffers, 1, "a put stopped before its swing");
    block_on(fabric.inner().inner(), client.put(b"k", &value)).expect("stored");
    drop((client, fabric));
    assert_eq!(home.ask(Ask::Scan { name: "s".into() }), Answer::Done);
    assert_eq!(home.settled("s").live_buffers, 1 + u64::from(PARTS), "the head and its parts");
}

#[test]
fn the_parts_of_a_put_cancelled_while_it_waits_for_memory_are_freed() {
    let home = Home::new(16);
    let (mut client, fabric) = scene(&home, 5);
    let endpoint = fabric.inner().inner();
    let mut count = 0u32;
    loop {
        match block_on(endpoint, client.put(&count.to_be_bytes(), &[0; 60_000])) {
            Ok(()) => count += 1,
            Err(KvError::OutOfMemory) => break,
            Err(error) => panic!("{error}"),
        }
    }
    for n in 0..PARTS {
        assert!(block_on(endpoint, client.delete(&n.to_be_bytes())).expect("a full store can be emptied"));
    }
    let before = home.settled("s").live_buffers;
    // Buffers for the parts are free, but none for a head of this size.
    let value = vec![1; PARTS as usize * PART_MAX];
    begin(&fabric, client.put(&[b'k'; 1000], &value));
    assert_eq!(home.settled("s").live_buffers, before);
    for n in 0..PARTS {
        block_on(endpoint, client.put(&n.to_be_bytes(), &[0; 60_000])).expect("the buffers are free again");
    }
}
