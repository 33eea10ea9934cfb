//! Tests of PRISM-KV when its session ends during an operation: the error states correctly whether the operation ran.

use crate::support::intercept::{Intercept, Then};
use crate::support::{Home, Intercepted, run};
use farside_fabrics::direct::Direct;
use farside_fabrics::layer::count::Count;
use farside_remote::control::{Answer, Ask};
use farside_remote::fabric::Ran;
use farside_systems::kv::Kv;
use farside_systems::kv::prism_kv::layout::PART_MAX;
use std::rc::Rc;

fn home() -> Home {
    let home = Home::new(64);
    home.create("s", 32, r#"{"items": 1000}"#);
    home
}

fn client(home: &Home) -> (Intercepted, Rc<Intercept<'static, Rc<Count<Direct>>>>) {
    let client = home.intercepted("s");
    let fabric = Rc::clone(client.fabric());
    (client, fabric)
}

#[test]
fn the_error_is_right_about_the_operation_whichever_reply_is_lost() {
    let home = home();
    let (mut kv, fabric) = client(&home);
    let (mut reader, at) = client(&home);
    let mut said = [0; 3];
    // A put sends the probe, then the install. With a cached slot it sends only the install.
    for cached in [false, true] {
        kv = kv.with_slot_cache(if cached { 16 } else { 0 });
        for ran in [Ran::Yes, Ran::No, Ran::Unknown] {
            for chains in 0..2 {
                run(fabric.inner(), kv.put(b"k", b"old")).expect("stored");
                fabric.of_chain(chains, Then::Lost(ran));
                let put = run(fabric.inner(), kv.put(b"k", b"new"));
                fabric.before_each(|| Then::Runs);
                let stored =
                    run(at.inner(), reader.get(b"k")).expect("read").expect("present").value == b"new";
                match put.map_err(|error| error.ran()) {
                    Ok(()) => assert!(stored && cached, "the only chain of the put was not lost"),
                    Err(Ran::Yes) => assert!(stored),
                    Err(Ran::No) => assert!(!stored),
                    Err(Ran::Unknown) => {
                        assert!(chains == 1 || cached, "the client knows that a probe stores nothing")
                    }
                }
                said[ran as usize] += 1;
                fabric.of_chain(0, Then::Lost(ran));
                let got = run(fabric.inner(), kv.get(b"k")).map(drop);
                assert_eq!(got.expect_err("the reply was lost").ran(), Ran::No, "a get changes nothing");
            }
        }
    }
    assert_eq!(said, [4; 3]);
}

#[test]
fn parts_of_a_value_that_may_be_stored_are_not_freed() {
    let home = home();
    let (mut kv, fabric) = client(&home);
    let value: Vec<u8> = (0..3 * PART_MAX).map(|n| (n / 7) as u8).collect();
    // One chain for each part, then the probe, then the install of the head, whose reply is lost.
    fabric.of_chain(4, Then::Lost(Ran::Yes));
    let put = run(fabric.inner(), kv.put(b"k", &value));
    assert_eq!(put.expect_err("the reply was lost").ran(), Ran::Unknown);
    drop((kv, fabric));
    let (mut reader, at) = client(&home);
    // New puts must not get the buffers of the parts.
    for n in 0..64u32 {
        run(at.inner(), reader.put(&n.to_be_bytes(), &vec![n as u8; PART_MAX - 100])).expect("stored");
        run(at.inner(), reader.delete(&n.to_be_bytes())).expect("deleted");
    }
    let item = run(at.inner(), reader.get(b"k")).expect("read").expect("present");
    assert!(item.value == value, "the parts are unchanged");
    assert_eq!(home.ask(Ask::Scan { name: "s".into() }), Answer::Done);
}
