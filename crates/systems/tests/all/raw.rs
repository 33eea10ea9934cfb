//! Tests of plain memory: the results and costs of each operation, and no leaked buffer.

use crate::support::{Home, run};
use farside_fabrics::direct::Direct;
use farside_fabrics::layer::count::{Costs, Count};
use farside_remote::arena::class::Class;
use farside_remote::control::{Answer, Ask};
use farside_remote::{Addr, BoundedPtr, ChainBuf, Fabric, NodeId, Reply, Status, allocate};
use farside_systems::kv::prism_kv::PrismKv;
use farside_systems::raw::{ECHO_MAX, GET_MAX, KIND, PUT_MAX, READ_MAX, Raw, RawError, SLOTS, WRITE_MAX};
use farside_systems::store::StoreError;
use std::rc::Rc;
use zerocopy::little_endian::{U64, U128};

const NODE: NodeId = NodeId(0);

struct Client {
    endpoint: Rc<Count<Direct>>,
    raw: Raw<Rc<Count<Direct>>>,
}

impl Client {
    fn open(home: &Home) -> Client {
        let endpoint = home.endpoint();
        let raw = run(&endpoint, Raw::open(Rc::clone(&endpoint), NODE, "s")).expect("the store exists");
        endpoint.take();
        Client { endpoint, raw }
    }

    /// Runs one operation. Returns the operation's output and costs.
    fn once<'a, O>(
        &'a mut self,
        operation: impl AsyncFnOnce(&'a mut Raw<Rc<Count<Direct>>>) -> O,
    ) -> (O, Costs) {
        let Client { endpoint, raw } = self;
        let output = run(endpoint, operation(raw));
        (output, endpoint.take())
    }

    fn put(&mut self, slot: u64, held: BoundedPtr, bytes: &[u8]) -> Result<BoundedPtr, RawError> {
        self.once(async |raw| raw.put(slot, held, bytes).await).0
    }
}

fn home() -> Home {
    let home = Home::new(32);
    home.create_of(KIND, "s", 16, "{}");
    home
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at % 251) as u8).collect()
}

#[test]
fn each_operation_is_one_round_trip() {
    let home = home();
    let mut client = Client::open(&home);
    let of = |costs: Costs| (costs.round_trips, costs.requests, costs.calls, costs.atomics, costs.retired);
    let (written, costs) = client.once(async |raw| raw.write(64, b"some bytes").await);
    assert_eq!((written, of(costs)), (Ok(()), (1, 1, 0, 0, 0)));
    let (read, costs) = client.once(async |raw| raw.read(69, 5).await.map(<[u8]>::to_vec));
    assert_eq!((read.as_deref(), of(costs)), (Ok(&b"bytes"[..]), (1, 1, 0, 0, 0)));
    let (old, costs) = client.once(async |raw| raw.fetch_add(0, 5).await);
    assert_eq!((old, of(costs)), (Ok(0), (1, 1, 0, 1, 0)));
    let (old, costs) = client.once(async |raw| raw.cas(0, &U64::new(5), &U64::new(9)).await);
    assert_eq!((old, of(costs)), (Ok(U64::new(5)), (1, 1, 0, 1, 0)));
    let (old, _) = client.once(async |raw| raw.cas(0, &U64::new(5), &U64::new(1)).await);
    assert_eq!(old, Ok(U64::new(9)), "a failed CAS changes nothing");
    let (old, _) = client.once(async |raw| raw.cas(0, &U128::new(9), &U128::new(u128::MAX)).await);
    assert_eq!(old, Ok(U128::new(9)));
    let (all, _) = client.once(async |raw| raw.read(0, 16).await.map(<[u8]>::to_vec));
    assert_eq!(all, Ok(vec![0xff; 16]));
    let (first, costs) = client.once(async |raw| raw.put(3, BoundedPtr::default(), b"first").await);
    assert_eq!(of(costs), (1, 1, 0, 1, 0));
    let (second, costs) = client.once(async |raw| raw.put(3, first.expect("a put"), b"second").await);
    assert_eq!(of(costs), (1, 1, 0, 1, 1), "the replaced buffer is retired");
    let (held, _) = client.once(async |raw| raw.pointer(3).await);
    assert_eq!(held, second);
    let (got, costs) = client.once(async |raw| raw.get(3, 100).await.map(<[u8]>::to_vec));
    assert_eq!(
        (got.as_deref(), of(costs)),
        (Ok(&b"second"[..]), (1, 1, 0, 0, 0)),
        "the bound limits the READ"
    );
    let (answer, costs) = client.once(async |raw| raw.echo(b"anyone there?").await.map(<[u8]>::to_vec));
    assert_eq!((answer.as_deref(), of(costs)), (Ok(&b"anyone there?"[..]), (1, 0, 1, 0, 0)));
}

#[test]
fn the_longest_requests_arrive_whole_and_longer_ones_panic() {
    let home = home();
    let mut client = Client::open(&home);
    let bytes = pattern(WRITE_MAX);
    client.once(async |raw| raw.write(0, &bytes).await).0.expect("a WRITE");
    let (read, _) = client.once(async |raw| raw.read(0, READ_MAX as u32).await.map(<[u8]>::to_vec));
    let read = read.expect("a READ");
    assert!(read.len() == READ_MAX && read.starts_with(&bytes));
    let (longer, _) = client.once(async |raw| raw.read(0, READ_MAX as u32 + 1).await.map(<[u8]>::len));
    assert_eq!(longer, Err(RawError::Refused(Status::TooLong)));
    let bytes = pattern(PUT_MAX);
    client.put(0, BoundedPtr::default(), &bytes).expect("a put");
    let (got, _) = client.once(async |raw| raw.get(0, GET_MAX as u32).await.map(<[u8]>::to_vec));
    assert!(got.is_ok_and(|got| got == bytes));
    let bytes = pattern(ECHO_MAX);
    let (answer, _) = client.once(async |raw| raw.echo(&bytes).await.map(<[u8]>::to_vec));
    assert!(answer.is_ok_and(|answer| answer == bytes));
    for too_long in [WRITE_MAX, PUT_MAX, ECHO_MAX] {
        let mut client = Client::open(&home);
        let built = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
            let bytes = pattern(too_long + 1);
            match too_long {
                PUT_MAX => client.put(1, BoundedPtr::default(), &bytes).map(drop),
                ECHO_MAX => client.once(async |raw| raw.echo(&bytes).await.map(drop)).0,
                _ => client.once(async |raw| raw.write(0, &bytes).await).0,
            }
        }));
        assert!(built.is_err(), "more than {too_long} bytes were accepted");
    }
}

#[test]
fn a_put_to_a_slot_that_another_client_changed_fails_and_leaks_nothing() {
    let home = home();
    let [mut one, mut other] = [Client::open(&home), Client::open(&home)];
    let held = one.put(5, BoundedPtr::default(), b"one").expect("a put");
    let now = other.put(5, held, b"other").expect("a put");
    assert!(matches!(one.put(5, held, b"one again"), Err(RawError::Conflict(_))));
    assert_eq!(other.once(async |raw| raw.pointer(5).await).0, Ok(now));
    drop((one, other));
    assert_eq!(home.settled("s").live_buffers, 1, "the buffer of the failed put is freed");
}

#[test]
fn a_scan_keeps_reachable_buffers_and_frees_those_of_a_dead_client() {
    let home = home();
    let mut client = Client::open(&home);
    for slot in 0..SLOTS {
        client.put(slot, BoundedPtr::default(), &pattern(100)).expect("a put");
    }
    let Answer::Store(store) = home.ask(Ask::OpenStore { name: "s".into() }) else {
        panic!("expected a store")
    };
    let mut chain = ChainBuf::new();
    let mut chain = chain.begin(store.extent().key);
    let list = Class::for_len(100).expect("a class").list();
    let bytes = pattern(100);
    let _ = chain.also(allocate(list, [&bytes, &[], &[]]));
    let mut reply = Reply::new();
    run(&client.endpoint, client.endpoint.run(NODE, &chain, &mut reply)).expect("the chain runs");
    assert_eq!((reply.last_status(), home.stat("s").live_buffers), (Status::Ok, SLOTS + 1));
    drop(client);
    home.ask(Ask::Scan { name: "s".into() });
    assert_eq!(home.settled("s").live_buffers, SLOTS);
    let mut client = Client::open(&home);
    for slot in 0..SLOTS {
        let (got, _) = client.once(async |raw| raw.get(slot, 100).await.map(<[u8]>::to_vec));
        assert!(got.is_ok_and(|got| got == pattern(100)), "slot {slot}");
    }
}

#[test]
fn puts_of_more_bytes_than_the_memory_reuse_buffers() {
    let home = home();
    let mut client = Client::open(&home);
    let mut held = BoundedPtr::default();
    for _ in 0..2000 {
        held = client.put(0, held, &pattern(1 << 15)).expect("replaced buffers are freed");
    }
}

#[test]
fn a_store_of_another_kind_and_wrong_parameters_are_refused() {
    let home = home();
    home.create("kv", 8, r#"{"items": 10}"#);
    let endpoint = home.endpoint();
    let opened = run(&endpoint, Raw::open(Rc::clone(&endpoint), NODE, "kv")).map(drop);
    assert!(matches!(opened, Err(StoreError::Gone(reason)) if reason.contains("is a prism-kv")));
    let opened = run(&endpoint, PrismKv::open(Rc::clone(&endpoint), NODE, "s")).map(drop);
    assert!(matches!(opened, Err(StoreError::Gone(reason)) if reason.contains("is a raw")));
    let opened = run(&endpoint, Raw::open(Rc::clone(&endpoint), NODE, "none")).map(drop);
    assert!(matches!(opened, Err(StoreError::Gone(_))));
    for (parameters, quota, remedy) in [
        (r#"{"items": 5}"#, 16, "omit --items"),
        (r#"{"placement": "permuted"}"#, 16, "omit --items"),
        (r#"{"size": 5}"#, 16, "takes no parameters"),
        ("{}", 1, "larger --quota"),
    ] {
        let ask = Ask::CreateStore {
            name: "t".into(),
            kind: KIND.into(),
            parameters: parameters.into(),
            quota: quota << 20,
        };
        let refused = home.host.ask(ask, std::time::Duration::from_secs(60)).expect_err("invalid parameters");
        assert!(refused.to_string().contains(remedy), "{parameters}: {refused}");
    }
    assert_eq!(Addr::NULL, BoundedPtr::default().ptr, "a slot of zeros has no buffer");
}
